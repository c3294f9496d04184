"""The job of bench/image: imports and a forward pass, then one line on standard output: ``ready``.

``start.py torch`` imports torch and transformers and runs a tiny Llama; ``start.py small`` does as much with numpy,
scikit-learn and pandas, for an image of a tenth of the size.
"""

import sys


def torch_start() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=4, **size))
    with torch.no_grad():
        assert model(torch.arange(16).reshape(1, 16)).logits.shape == (1, 16, 512)


def small_start() -> None:
    import numpy
    import pandas
    from sklearn.linear_model import LinearRegression

    frame = pandas.DataFrame({"x": numpy.arange(64.0), "y": numpy.arange(64.0) * 2 + 1})
    assert abs(LinearRegression().fit(frame[["x"]], frame["y"]).predict(frame[["x"]])[3] - 7.0) < 1e-6


{"torch": torch_start, "small": small_start}[sys.argv[1]]()
print("ready", flush=True)

"""A job with Hugging Face's Trainer: ``python -m support.trainerjob OUTPUT STEPS [CHECKPOINT]`` prints its result."""

from __future__ import annotations

import json
import sys


def main(output: str, steps: int, checkpoint: str | None = None) -> None:
    import torch
    import transformers
    from blake3 import blake3

    transformers.logging.set_verbosity_error()
    transformers.set_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=128, n_head=2, n_positions=64, vocab_size=6000)
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 6000, (32,), generator=generator) for _ in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=output, max_steps=steps, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train(resume_from_checkpoint=checkpoint)
    digest = blake3()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().data))
    print(json.dumps({"step": trainer.state.global_step, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])

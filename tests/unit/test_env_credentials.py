"""Credentials: removed from documents, found in captured files, and packages' own examples left alone."""

from __future__ import annotations

import base64
import gc
import hashlib
import re
from pathlib import Path

import pytest

from bootseer import patterns
from bootseer.config import Config
from bootseer.env import EnvSpec, Target, credentials, inputs
from bootseer.env.credentials import (
    SecretScan,
    holds_password,
    redact,
    remove_credentials,
    remove_from_command,
    remove_from_variable,
)

WORD = b"aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD5fG"
"""Looks like a token, opens nothing."""
PEM = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"MIIEowIBAAKCAQEA" * 4 + b"\n-----END RSA PRIVATE KEY-----\n"


def find(*, pieces: bool = False, **files: bytes) -> dict[str, str]:
    scan = SecretScan()
    for path, data in files.items():
        scan.look(path, [data[at : at + 50] for at in range(0, len(data), 50)] if pieces else [data])
    return dict(scan.findings())


def test_urls_lose_user_and_password() -> None:
    assert remove_credentials("x https://a:b@h/p git+ssh://git@h/r") == (
        "x https://<credential>@h/p git+ssh://<credential>@h/r"
    )
    assert remove_credentials("https://h/p?q=a@b mail a@b") == "https://h/p?q=a@b mail a@b"


def test_commands_and_variables() -> None:
    assert remove_from_command(["x", "--password", "p", "--api-key=k", "--token", "--other"]) == [
        "x", "--password", "<credential>", "--api-key=<credential>", "--token", "--other",
    ]  # fmt: skip
    assert remove_from_variable("HF_TOKEN", "abc") == "<credential>"
    assert remove_from_variable("HF_TOKEN", "") == ""
    for name in ("DB_PASS", "MYSQL_PWD", "SSHPASS", "GH_PAT", "TOKEN_GITHUB", "SECRET_VALUE"):
        assert remove_from_variable(name, "abc") == "<credential>", name
    assert remove_from_variable("ONE", "abc") != remove_from_variable("TWO", "abc")  # who shares a value is not told
    assert remove_from_variable("PGPASSWORD", "abc") == "<credential>"
    assert remove_from_variable("CUDA_VERSION", "12.4") == "12.4"


def test_values_of_variables_are_digests_unless_they_are_harmless() -> None:
    shown = remove_from_variable("PIP_INDEX_URL", "https://u:p@h/simple")
    assert shown == remove_from_variable("PIP_INDEX_URL", "https://u:rotated@h/simple")
    assert shown != remove_from_variable("PIP_INDEX_URL", "https://u:p@h/other")
    assert shown.startswith("<digest ")
    # not the name of a secret, though a secret's name is in it: a new version is a new environment
    assert remove_from_variable("TOKENIZERS_VERSION", "1") != remove_from_variable("TOKENIZERS_VERSION", "2")


@pytest.mark.parametrize(
    ("value", "slow"),
    [
        ("/root", 0),
        ("/opt/a-b_1.2:/usr/bin", 0),
        ("1", 0),
        ("True", 0),
        ("hunter2", 1),
        ("/a b", 1),
        ("12345", 1),
        ("/hunter2", 1),
        ("/opt/x:/hunter2", 1),
        ("/a/Xk7f9Q2mZp4LwB8sT1vR6", 1),
    ],
)
def test_only_what_may_be_guessed_costs_a_slow_digest(monkeypatch: pytest.MonkeyPatch, value: str, slow: int) -> None:
    asked = list[object]()
    monkeypatch.setattr(credentials, "slow_digest", lambda data: asked.append(data) or "0" * 64)
    shown = remove_from_variable("SOME", value)
    assert shown.startswith("<digest ")
    assert value not in shown
    assert len(asked) == slow
    assert shown != remove_from_variable("OTHER", value) or slow


SCRIPT = f"""#!/bin/sh
export HF_TOKEN=hf_{WORD.decode()} DB_PASSWORD=hunter2
WANDB_THING={WORD.decode()[::-1]}
machine h login me password hunter2
curl -u me:hunter2 -H 'Authorization: Bearer hunter2' https://me:hunter2@h/x
gcloud --key '{{"api_key": "hunter2"}}'
pip install torch==2.5.0 tokenizers==0.19 --hash=sha256:{"ab12" * 16}
"""


@pytest.mark.parametrize(
    "text",
    [
        "export DB_PASS=hunter2", "MYSQL_PWD=hunter2 mysql", "mysql -u me -phunter2", "sshpass -p hunter2 ssh h",
        "x --key 1b4e28ba-2fa1-11d2-883f-0016d3cca427", f"x {'AB12' * 8}", "registry_auth: 'hunter2'",
    ],
)  # fmt: skip
def test_short_names_and_plain_numbers_are_hidden(text: str) -> None:
    for secret in ("hunter2", "1b4e28ba", "AB12"):
        assert secret not in redact(text)
    assert redact("mkdir -p a; compass=1; mysql --port=1") == "mkdir -p a; compass=1; mysql --port=1"


@pytest.mark.parametrize(
    ("name", "data", "slow"),
    [
        ("db_password", b"hunter2\n", True),
        ("hub-token.txt", b"hunter2\n", True),
        ("app.ini", b"[db]\npassword = hunter2\n", True),
        ("a.yaml", b"  apiKey: hunter2\n", True),
        ("a.py", b"PASSWORD = 'hunter2'\n", True),
        ("a.py", b"token = next(tokens)\ntoken: str\n", False),
        ("tokenizer.json", b"{}", False),
        ("r.txt", b"torch==2.5\n", False),
    ],
)
def test_digests_of_what_may_hold_a_weak_password_are_slow(tmp_path: Path, name: str, data: bytes, slow: bool) -> None:
    assert holds_password(name, data) is slow
    digests = inputs.Digests(EnvSpec(targets=(Target("/opt/env"),), command=("x",)), Config(cache_dir=str(tmp_path)))
    for folder in (tmp_path, tmp_path / "site-packages"):
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        assert (digests.of(str(folder / name)) != hashlib.sha256(data).hexdigest()) is slow


def test_a_text_for_people_shows_no_secret() -> None:
    shown = redact(SCRIPT)
    for secret in ("hunter2", WORD.decode(), WORD.decode()[::-1], "me:"):
        assert secret not in shown
    assert "torch==2.5.0 tokenizers==0.19" in shown


def test_a_command_shows_no_secret_but_a_change_of_it_counts() -> None:
    one, two = (remove_from_command(["sh", "-c", f"DB_PASSWORD={word} make"]) for word in ("hunter2", "hunter3"))
    assert "hunter2" not in str(one)
    assert one != two
    tokens = [remove_from_command(["sh", "-c", f"login hf_{word.decode()}"]) for word in (WORD, WORD[::-1])]
    assert tokens[0] == tokens[1] == ["sh", "-c", "login <credential>"]


@pytest.mark.parametrize(
    ("path", "data", "what"),
    [
        ("root/.netrc", b"machine h\nlogin me\npassword s3cret\n", "netrc password"),
        (".pypirc", b"[pypi]\nusername = u\npassword = s3cret\n", "package index password"),
        ("pip.conf", b"[global]\nindex-url = https://me:s3cret9@index.corp/simple\n", "password in a URL"),
        ("etc/key.pem", PEM, "private key"),
        ("x.py", b"KEY = '''" + PEM + b"'''", "private key"),
        (".docker/config.json", b'{"auths":{"h":{"auth":"dTpw"}}}', "registry credentials"),
        ("a.dist-info/direct_url.json", b'{"url":"https://me:s3cret9@h/a.whl"}', "password in a URL"),
        ("x.txt", b"https://" + WORD + b"@h/r.git", "token in a URL"),
        ("x.txt", b"https://me:%40bc%2F9@h/", "password in a URL"),
        ("x.txt", b"https://me:s3c{r}et[9]@h/", "password in a URL"),
        ("x.py", b"T = 'ghp_" + WORD + b"'", "access token"),
        ("x.py", b"T = 'github_pat_" + WORD[:22] + b"_" + WORD + b"'", "access token"),
        ("x.env", b"T=glpat-" + WORD[:20], "access token"),
        (".cache/token", b"hf_" + WORD, "access token"),
        ("credentials", b"aws_secret_access_key = " + WORD + b"/+" + WORD[:6] + b"\n", "cloud access key"),
        (".npmrc", b"//npm.corp/:_authToken=abc\n", "package registry token"),
        (".env", b"A=1\nexport DB_PASSWORD='hunter2'\n", "secret variable"),
        ("conf/prod.env", b"OPENAI_API_KEY=abc\n", "secret variable"),
        ("sa.json", b'{"type":"service_account","private_key":"' + PEM.replace(b"\n", b"\\n") + b'"}', "private key"),
        ("application_default_credentials.json", b'{"refresh_token": "1//0abc"}', "cloud credentials"),
        ("x.py", b"AKIAZ7QX2LMN5PRS3TUV", "access token"),
        ("x.py", b"k = 'AIza" + WORD + b"'", "access token"),
        ("x.py", b"'sk-proj-" + WORD + b"'", "access token"),
        ("x.py", b"xoxb-1234567890-" + WORD, "access token"),
        ("x.json", b'"npm_' + WORD + b'x"', "access token"),
        ("x.txt", b"dapi" + b"0123456789abcdef" * 2, "access token"),
        ("x.txt", b"eyJ" + WORD + b".eyJ" + WORD + b"." + WORD, "access token"),
        ("x.txt", b"DefaultEndpointsProtocol=https;AccountKey=" + (WORD * 3)[:86] + b"==;", "access token"),
        ("kubeconfig", b"    client-key-data: " + WORD * 3, "private key"),
        (".pgpass", b"h:5432:db:me:hunter2\n", "database password"),
    ],
)
@pytest.mark.parametrize("pieces", [False, True])
def test_secrets_are_found(path: str, data: bytes, what: str, pieces: bool) -> None:
    assert find(pieces=pieces, **{path: data}) == {path: what}


def test_a_secret_in_a_large_file_is_found() -> None:
    data = b"nothing to see\n" * 200_000
    scan = SecretScan()
    scan.look("log", iter([data, data[:-4] + b" hf_", WORD + b"\n", data]))
    assert dict(scan.findings()) == {"log": "access token"}


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (".netrc", b"machine h\nlogin me\n"),
        ("doc.py", b"proxy = 'http://user:password@host/'"),
        ("doc.py", b"'http://user:pass@host' 'http://%s:%s@host' 'https://u:${TOKEN}@h' 'http://a:{b}@c'"),
        ("x.bin", b"\0\1" + PEM),
        ("readme.txt", b"-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----"),
        ("config.json", b'{"hidden_size": 4096, "author": "x"}'),
        ("x.txt", b"see http://host:8080/a@b"),
        ("x.py", b"'https://u:%(pw)s@h' 'https://u:%PASS%@h' 'https://u:[a-z]+@h' 'https://u:{a}{b}@h'"),
        ("x.py", b"'https://a_quite_long_example_name@h' ghp_xxxxxxxxxxxxxxxxxxxxxxxx hf_transformers_model_name_of_x"),
        ("x.py", b"aws_secret_access_key=settings.AwsSecretKey1 aws_secret_access_key=wJalrXUtnFEMIbPxRfiCYEXAMPLEKEY"),
        (".npmrc", b"//npm.corp/:_authToken=${NPM_TOKEN}\n"),
        (".env", b"PORT=8080\nDB_PASSWORD=${DB_PASSWORD}\nAPI_KEY=your-key-here\nTOKENIZERS_PARALLELISM=false\n"),
        (".env.example", b"DB_PASSWORD=hunter2\n"),
        ("x.py", b"npm_config_cache_maximum_age_9 sk-learn AKIAIOSFODNN7EXAMPLE"),
    ],
)
def test_examples_are_no_secrets(path: str, data: bytes) -> None:
    assert find(**{path: data}) == {}


def test_what_a_wheel_brought_is_public_while_unchanged() -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(PEM).digest()).rstrip(b"=").decode()
    record = f"pkg/test.key,sha256={digest},{len(PEM)}\npkg-1.dist-info/RECORD,,\n".encode()
    assert find(**{"lib/pkg/test.key": PEM, "lib/pkg-1.dist-info/RECORD": record}) == {}
    changed = PEM.replace(b"MII", b"MIJ")
    assert find(**{"lib/pkg/test.key": changed, "lib/pkg-1.dist-info/RECORD": record}) == {
        "lib/pkg/test.key": "private key"
    }


def test_what_was_built_from_a_folder_is_not_public() -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(PEM).digest()).rstrip(b"=").decode()
    record = f"pkg/test.key,sha256={digest},{len(PEM)}\n".encode()
    files = {"pkg/test.key": PEM, "pkg-1.dist-info/RECORD": record}
    for origin in (b'{"dir_info":{},"url":"file:///job"}', b'{"url":"https://h/r","vcs_info":{"vcs":"git"}}'):
        assert find(**files, **{"pkg-1.dist-info/direct_url.json": origin}) == {"pkg/test.key": "private key"}
    assert find(**files, **{"pkg-1.dist-info/direct_url.json": b'{"archive_info":{},"url":"https://h/a.whl"}'}) == {}


def test_generated_files_are_no_part_of_a_wheel() -> None:
    data = b'{"url":"https://me:s3cret9@h/a.whl"}'
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record = f"a.dist-info/direct_url.json,sha256={digest},9\n".encode()
    assert find(**{"a.dist-info/direct_url.json": data, "a.dist-info/RECORD": record}) != {}


def test_every_pattern_compiles() -> None:
    gc.unfreeze()  # a program that ran in this process may have frozen them
    found = gc.get_objects()
    shapes = [one for one in found if type(one) is type(patterns.pattern("x"))]
    assert len(shapes) > 40
    for shape in shapes:
        assert re.compile(shape.pattern).pattern == shape.pattern

"""Credentials: removed from documents, found in captured files, and packages' own examples left alone."""

from __future__ import annotations

import base64
import hashlib

import pytest

from bootseer.env.credentials import SecretScan, remove_credentials, remove_from_command, remove_from_variable

WORD = b"aB3dE5gH7jK9mN1pQ2sT4vW6xY8zA0cD5fG"
"""Looks like a token, opens nothing."""
PEM = b"-----BEGIN RSA PRIVATE KEY-----\n" + b"MIIEowIBAAKCAQEA" * 4 + b"\n-----END RSA PRIVATE KEY-----\n"


def find(**files: bytes) -> dict[str, str]:
    scan = SecretScan()
    for path, data in files.items():
        scan.look(path, data)
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
    assert remove_from_variable("PIP_INDEX_URL", "https://u:p@h") == "https://<credential>@h"


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
    ],
)
def test_secrets_are_found(path: str, data: bytes, what: str) -> None:
    assert find(**{path: data}) == {path: what}


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


def test_generated_files_are_no_part_of_a_wheel() -> None:
    data = b'{"url":"https://me:s3cret9@h/a.whl"}'
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    record = f"a.dist-info/direct_url.json,sha256={digest},9\n".encode()
    assert find(**{"a.dist-info/direct_url.json": data, "a.dist-info/RECORD": record}) != {}

"""Variables that decide what a set-up command does: those in its text and in that of its scripts, and the settings of
the installers that it names.

What differs from start to start (of a shell, a job of Slurm, a rank) does not count, else no start would ever hit.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from bootseer.env import hardware
from bootseer.env.credentials import remove_from_variable
from bootseer.patterns import pattern

_USED = pattern(
    r"\$(?!ENV\{)\{?[!#]?([A-Za-z_]\w*)|\$\(([A-Za-z_]\w*)\)|[\"']([A-Za-z_]\w+)[\"']"
    r"|(?:\b(?:environ(?:\.get)?\s*[\[(]|(?:getenv|env::var|(?:option_)?env!)\s*\(|process\.env[.\[]|ENV(?:IRON)?[\[{])"
    r"|\bprintenv[ \t]+|(?:\[|\btest)[ \t]+(?:![ \t]+)?-v[ \t]+|(?m:^)[ \t]*ifn?def[ \t]+)\s*[\"']?([A-Za-z_]\w*)"
    r"|%\(([A-Za-z_]\w*)\)s"
)
"""In the files of any language: a shell's ``$NAME``, a Makefile's ``$(NAME)``, a name in quotes, one that is asked of
the environment, Python's ``%(NAME)s``."""
_SEVERAL = pattern(r"\{([\w\s,:=\"'-]{1,500})\}\s*=\s*process\.env\b")
_ASKS = pattern(r"\b(?:environ\b|getenv|process\.env)")
_RENAMED = pattern(r"\bprocess\.env\b(?!\s*[.\[])")
_ATTRIBUTE = pattern(r"\.([A-Z][A-Z0-9_]{2,})\b")
"""As in ``const e = process.env; e.NAME``."""
_ASSIGNED = pattern(
    r"(?<![\w{])(\w+)[ \t]*:{0,2}=(?![^\n]{0,200}\b\1\b)|\bfor[ \t]+(\w+)[ \t]+in\b"
    r"|(?<![\w-])read[ \t]+(?:-\w+[ \t]+){0,8}(\w+)"
)
_VALUE = r"(?:[^\s;&|\"'`()\\#<>]|\"(?:[^\"`\\\n()]|\$\([^()\n]*\))*\"|'[^'\n]*'|\$\([^()\n]*\))*"
_SET = (
    r"(?m)(?:^|;[ \t]*)(?:export[ \t]+|readonly[ \t]+)?{name}=" + _VALUE + r"(?=[ \t]*(?:[\n;]|&&|[ \t]#))"
    r"|\bfor[ \t]+{name}[ \t]+in\b"
)
_GOES_ON = pattern(r"(?:\\|&&|\|)\s*\Z")
_SETS = 100
_BLOCKS = (("if", "fi"), ("case", "esac"), ("do", "done"))
_OF_ONE_START = pattern(
    r"HOME|PWD|OLDPWD|USER|LOGNAME|E?UID|GROUPS|HOST(?:NAME)?|PATH|SHELL|TERM|IFS|PS\d|REPLY|_|TE?MP(?:DIR)?|TMPDIR|S?RANDOM"
    r"|SECONDS|LINENO|PPID|SHLVL|EPOCH\w+|OPTARG|OPTIND|FUNCNAME|PIPESTATUS|BASH\w*|DISPLAY|XDG_(?:RUNTIME|SESSION)\w*"
    r"|(?:SLURM|SBATCH|SRUN|PMIX?|OMPI|PBS|LSB|SSH|DBUS|KUBERNETES|TORCHELASTIC|BOOTSEER|RAY)_\w+|SLURMD?\w*|POD_\w+|JOB_ID"
    r"|(?:\w+_)?(?:RANK|WORLD_SIZE)|MASTER_(?:ADDR|PORT)|NODE_NAME|CUDA_VISIBLE_DEVICES|JOB_COMPLETION_INDEX|\w*_PID"
    r"|(?:\w+_)?(?:N?JOBS|NPROC|NUM_THREADS|PARALLEL_LEVEL)"
)
_OF_RUNS = pattern(
    r"(?:\w+_)?(?:RUN|JOB|TASK|TRIAL|ATTEMPT|SESSION|INVOCATION)_(?:UU)?ID|COLUMNS|LINES|MAKELEVEL|JOURNAL_STREAM"
    r"|\w+_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|(?:\w+_)?(?:HOST|NODE)_(?:IP|ID|NAME)|\w+_SOCKET_IFNAME"
    r"|(?:\w+_)?(?:RUN|BUILD)_NUMBER|CI_PIPELINE_I?ID|(?:\w+_)?(?:TASK|ARRAY)_INDEX"
)
"""Beside these: in a file that the command reads they are more likely for the job than for it."""
_OF_COMPILERS = pattern(
    r"(?:C|CXX|CPP|F|FC|LD|ARCH|GO|NVCC_(?:APPEND|PREPEND)_)FLAGS|CC|CXX|CPP|LD|AR|FC|NVCC|CUDA_(?:HOME|PATH)|CUDACXX|CUDAARCHS"
    r"|TORCH_CUDA_ARCH_LIST|FORCE_CUDA|CMAKE_(?!BUILD_PARALLEL)\w+|SKBUILD_\w+|SETUPTOOLS_\w+|PKG_CONFIG_\w*PATH|CPATH"
    r"|LIBRARY_PATH|C(?:PLUS)?_INCLUDE_PATH|TZ|SOURCE_DATE_EPOCH"
)
"""What builds of any package act on, and what each program that writes a time does."""
_MAKE_SETS = pattern(r"(?:^|\s)[A-Za-z_]\w*[:?+]?=")
"""In ``MAKEFLAGS``, which else say how much is done at once."""
_ALL = pattern(
    r"\b(?:print)?env[ \t]*\||environ\.(?:items|keys)|\bin[ \t]+(?:os\.)?environ\b(?!\.get)|Object\.\w+\(process\.env"
    r"|\$\{!\w+[*@]"
)
_PREFIX = pattern(r"(?<![A-Za-z0-9_$])\^?([A-Z][A-Z0-9]*_)(?![A-Za-z0-9_])")
"""In a text that looks at `_ALL` variables: how those begin that it means."""
_INDIRECT = pattern(r"\beval\b|\$\{!\w+\}")
_NAME_GIVEN = pattern(r"=[\"']?([A-Za-z_]\w*)\b")
_TOOLS = {
    "pip": ("PIP_", "PYTHONUSERBASE"),
    "pipx": ("PIPX_", "PIP_"),
    "uv": ("UV_",),
    "npm": ("NPM_CONFIG_", "npm_config_"),
    "pnpm": ("PNPM_", "pnpm_config_", "NPM_CONFIG_", "npm_config_"),
    "yarn": ("YARN_", "yarn_", "NPM_CONFIG_", "npm_config_"),
    "bundle": ("BUNDLE_",),
    "cargo": ("CARGO_", "RUSTFLAGS", "RUSTUP_TOOLCHAIN", "RUSTC"),
    "go": (
        *("GOPROXY", "GOOS", "GOARCH", "GOAMD64", "GOARM", "GOTOOLCHAIN", "GOEXPERIMENT", "GO111MODULE", "GOROOT"),
        *("GOWORK", "GOENV", "GOBIN", "CGO_"),
    ),
    "apt": ("APT_CONFIG",),
    "conda": ("CONDA_", "MAMBA_"),
    "poetry": ("POETRY_",),
    "pdm": ("PDM_",),
    "pixi": ("PIXI_",),
    "curl": ("CURL_HOME",),
    "wget": ("WGETRC",),
}
_SAME_AS = {"uvx": "uv", "npx": "npm", "mamba": "conda", "micromamba": "conda", "pip3": "pip", "apt-get": "apt"}
_STARTED = pattern(
    rf"\b({'|'.join([*_TOOLS, *_SAME_AS])})\b(?=[\"', \t](?:[^\n;&|]{{0,60}}?[\"', \t])?"
    r"(?:add|build|ci|create|exec|generate|get|i|install|pip|run|sync|tool|update|venv|wheel)\b)"
)
_UV_PIP = pattern(r"\buv\b([\"', \t]+(?:-[^\s\"',]*[\"', \t]+){0,8})pip\b")
"""That reads nothing of pip's."""
_NO_MATTER = pattern(
    r"(?i)(?:CACHE|STORE_DIR|GLOBAL_FOLDER|PNPM_HOME|WORKERS|MAXSOCKETS|THREADS|PARALLEL|_JOBS$|CHECK_UPDATE|TELEMETRY|ROOT_USER_ACTION"
    r"|TIMEOUT|RETRIES|PROGRESS|QUIET|VERBOSE|COLOR|CONCURREN|VERSION_CHECK|_INPUT$|_LOG(?:_|$|LEVEL)|_CERT$|CAFILE|(?<!^GO)PROXY"
    r"|SHLVL|PROMPT|_EXE$|CARGO_HOME|NPM_CONFIG_(?:PREFIX|USERCONFIG|UPDATE_NOTIFIER|FUND|AUDIT)|_AUTH|AUTHTOKEN|USERNAME|HTTP_BASIC|PYPI_TOKEN)"
)
"""Of installers: where they keep and how they show things, and their logins."""
_PYTHON = (".python-version", ".python-versions")
_PIP = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf", "$PIP_CONFIG_FILE", "$VIRTUAL_ENV/pip.conf")
_NPM = ("/etc/npmrc", "~/.npmrc", "$NPM_CONFIG_USERCONFIG", ".npmrc")
SETTINGS = {
    "pip": _PIP,
    "pipx": _PIP,
    "uv": ("/etc/uv/uv.toml", "~/.config/uv/uv.toml", "$UV_CONFIG_FILE", "uv.toml", "pyproject.toml", *_PYTHON),
    "npm": _NPM,
    "pnpm": (*_NPM, "~/.config/pnpm/rc", "pnpm-workspace.yaml", ".pnpmfile.cjs"),
    "yarn": (*_NPM, "~/.yarnrc", "~/.yarnrc.yml", ".yarnrc", ".yarnrc.yml"),
    "bundle": ("~/.bundle/config", ".bundle/config"),
    "cargo": ("~/.cargo/config.toml", "$CARGO_HOME/config.toml", ".cargo/config.toml", "rust-toolchain.toml"),
    "go": ("~/.config/go/env", "$GOENV", "go.work"),
    "apt": ("/etc/apt/sources.list", "$APT_CONFIG"),
    "conda": ("/etc/conda/.condarc", "~/.condarc", "~/.mambarc", "$CONDARC"),
    "poetry": ("~/.config/pypoetry/config.toml", "poetry.toml"),
    "pdm": ("~/.config/pdm/config.toml", "pdm.toml"),
    "curl": ("~/.curlrc", "~/.config/curlrc", "$CURL_HOME/.curlrc"),
    "wget": ("~/.wgetrc", "$WGETRC"),
}
"""Where they have settings. What is not absolute may lie in a folder above, too."""
PROJECTS = {
    "pip": ("pyproject.toml", "setup.py", "setup.cfg"),
    "uv": ("uv.lock", "pylock.toml", "setup.py", "setup.cfg"),
    "npm": ("package.json", "package-lock.json", "npm-shrinkwrap.json"),
    "pnpm": ("package.json", "pnpm-lock.yaml"),
    "yarn": ("package.json", "yarn.lock"),
    "bundle": ("Gemfile", "Gemfile.lock"),
    "cargo": ("Cargo.toml", "Cargo.lock"),
    "go": ("go.mod", "go.sum"),
    "poetry": ("pyproject.toml", "poetry.lock"),
    "pdm": ("pyproject.toml", "pdm.lock"),
    "pixi": ("pyproject.toml", "pixi.toml", "pixi.lock"),
}
"""What they read of a project."""
_ABOVE = 10
_BEGINS = r"(?:(?:^|[;&|({`])[ \t]*|\b(?:then|do|else|exec)[ \t]+)"
_READS = r"(?:\.|source|(?:ba|da|z)?sh|python[\d.]*)[ \t]+(?:-[a-z]+[ \t]+)*"
_OPTION = r"(?:[ \t](?:-r|-c)[ \t]*|--(?:requirements?|constraints?)[ =])"
_NAME = r"((?:\"[^\"\n]+\"|'[^'\n]+'|\$\([^)\n]*\)|[^\s\"';&|<>()])+)"
_READ = pattern(f"(?m)(?:{_BEGINS}{_READS}|{_OPTION})(?!-){_NAME}")
_OWN_FOLDER = pattern(
    r"\$\(\s*cd\s+(?:-\w\s+)?[\"']?\$\(\s*dirname[^()]*(?:\$\([^()]*\)[^()]*)?\)[\"']?((?:/[\w.]+)*)[^()]*\)"
    r"|\$\(\s*dirname\s+[^()]*(?:\$0|BASH_SOURCE)[^()]*\)|\$\{(?:0|BASH_SOURCE(?:\[0\])?)%/\*\}"
    r"|\$\{CMAKE_(?:CURRENT_)?(?:SOURCE|LIST)_DIR\}"
)
_WORKING_FOLDER = pattern(r"\$\(\s*pwd\s*\)|`pwd`|\$\(CURDIR\)|\$\{?PWD\b\}?")
VARIABLE = pattern(r"\$(?:\{(\w+)\}|(\w+))")


def counted(texts: Collection[str], env: Mapping[str, str], *, all_tools: bool) -> set[str]:
    """The names of variables in ``env`` that decide what the ``texts`` (of a command and its scripts) do; with
    ``all_tools`` the settings of all installers, as there are scripts that cannot be read."""
    found, tools = set[str](), set(_TOOLS) if all_tools else set[str]()
    for text in texts:
        tools |= tools_in(text)
        first, _ = _uses(text)
        used = (name for name in first if name in env and not _OF_ONE_START.fullmatch(name))
        found |= {name for name in used if not _is_set(text, name, first[name])}
        found |= _by_name(text, env)
    prefixes = tuple(prefix for tool in tools for prefix in _TOOLS[tool])
    settings = _settings(prefixes, env)
    compilers = set(filter(_OF_COMPILERS.fullmatch, env))
    if _MAKE_SETS.search(env.get("MAKEFLAGS", "")):
        compilers.add("MAKEFLAGS")
    texts = [*texts, *(env[name] for name in compilers)]
    return found | settings | compilers | set().union(*map(hardware.counted, texts))


def mentioned(text: str, env: Mapping[str, str]) -> set[str]:
    """The names of variables that may decide what a program does with the text of a file that it reads: set ones, and
    those in capitals that neither ``env`` nor the text sets, and those of the installers that it starts (`value`)."""
    first, kinds = _uses(text)
    names = set(filter(decides, first))
    unset = {name for name in names if name.isupper() and name not in env and kinds[name]}
    if any(kinds[name] == 1 for name in unset):
        own = {name for found in _ASSIGNED.findall(text) for name in found}
        unset = {name for name in unset if kinds[name] == 2 or name not in own}
    return (
        unset
        | {name for name in names if name in env and not _is_set(text, name, first[name])}
        | _by_name(text, env)
        | hardware.counted(text)
        | {f"_{_SAME_AS.get(tool, tool)}" for tool in _STARTED.findall(_UV_PIP.sub(r"uv\1", text))}
    )


def value(name: str, env: Mapping[str, str]) -> str | None:
    """What is compared of ``name``: a variable, the processor or the GPUs (`hardware`), or the settings of an installer
    (``_pip``), with digests of their values. None where there is none."""
    if name not in env and name[:1] == "_" and (prefixes := _TOOLS.get(name[1:])):
        set_ones = sorted(_settings(prefixes, env))
        return "\n".join(f"{one}={remove_from_variable(one, env[one])}" for one in set_ones) or None
    return env.get(name, hardware.value(name))


def _settings(prefixes: tuple[str, ...], env: Mapping[str, str]) -> set[str]:
    """The variables of an installer that decide: not where a build works, among what is temporary."""
    temporary = tuple(f"{one.rstrip('/')}/" for one in ("/tmp", "/var/tmp", "/dev/shm", env.get("TMPDIR")) if one)
    found = {name for name in env if name.startswith(prefixes) and not _NO_MATTER.search(name)}
    return {one for one in found if not (one.endswith("TARGET_DIR") and env[one].startswith(temporary))}


def shown(name: str) -> str:
    """``name`` for people."""
    if name[:1] == "_" and name[1:] in _TOOLS:
        return f"a variable of {name[1:]}"
    return hardware.SHOWN.get(name) or f"the variable {name}"


def _by_name(text: str, env: Mapping[str, str]) -> set[str]:
    """Those of ``env`` that the text finds by how their names begin, or by a name that it has in another variable."""
    found = set[str]()
    if _ALL.search(text) and (begins := tuple({*_PREFIX.findall(text)})):
        found = {name for name in env if name.startswith(begins)}
    if _INDIRECT.search(text):
        found |= {name for name in _NAME_GIVEN.findall(text) if name in env}
    return set(filter(decides, found))


def _uses(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Name -> where it is used first, and -> 2 where the environment is asked for it, 0 where it is only in quotes."""
    first, kinds = dict[str, int](), dict[str, int]()
    asks = _ASKS.search(text) is not None
    for use in _USED.finditer(text):
        name = use[use.lastindex or 1]
        first.setdefault(name, use.start())
        kinds[name] = max(kinds.get(name, 0), (asks and len(name) > 2) if use[3] else 2 if use[4] else 1)
    for use in _ATTRIBUTE.finditer(text) if _RENAMED.search(text) else ():
        first[use[1]], kinds[use[1]] = min(first.get(use[1], use.start()), use.start()), 2
    for use in _SEVERAL.finditer(text) if "process.env" in text else ():
        for name in re.findall(r"[A-Za-z_]\w*", use[1]):
            first[name], kinds[name] = min(first.get(name, use.start()), use.start()), 2
    return first, kinds


def tools_in(text: str) -> set[str]:
    """The installers that a text names."""
    words = set(re.findall(r"[a-z]+3?", _UV_PIP.sub(r"uv\1", text)))
    return {_SAME_AS.get(word, word) for word in words} & set(_TOOLS)


def _is_set(text: str, name: str, end: int) -> bool:
    """Whether the script surely sets it before the place ``end``: outside of all blocks, texts and conditions. Of a
    variable that is set more often than `_SETS` times nobody looks further, and it counts."""
    for found in itertools.islice(re.compile(_SET.format(name=name)).finditer(text, 0, end), _SETS):
        before = re.sub(r"\$\{[^}\n]*\}|#.*", "", text[: found.start()])
        blocks = all(len(re.findall(rf"\b{a}\b", before)) == len(re.findall(rf"\b{b}\b", before)) for a, b in _BLOCKS)
        pairs = before.count("{") == before.count("}") and before.count("(") == before.count(")")
        quotes = before.count('"') % 2 == before.count("'") % 2 == 0
        if blocks and pairs and quotes and not _GOES_ON.search(before) and not _in_document(before):
            return True
    return False


def _in_document(before: str) -> bool:
    """Whether a here-document goes on."""
    begin = re.compile(r"<<-?[ \t]*[\"'\\]?(\w+)").match(before, max(0, before.rfind("<<")))
    return begin is not None and not re.compile(rf"(?m)^[ \t]*{begin[1]}[ \t]*$").search(before, begin.end())


def in_place(text: str, folder: str, work: str) -> str:
    """``text`` of a script in ``folder``, with the places that it takes from where it lies and starts."""
    text = _OWN_FOLDER.sub(lambda one: folder + (one[1] or ""), text.partition("\0")[0])
    return _WORKING_FOLDER.sub(lambda _: work, text)


def files_named(text: str, by: str, env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(as it is written, path) of the scripts and requirement files that the shell text of the file ``by`` names."""
    for found in _READ.finditer(in_place(text, posixpath.dirname(by) or ".", ".")):
        written = re.sub(r"[\"']", "", found[1])
        path = expanded(written, env)
        if not re.search(r"[$`*?\0]", path) and "://" not in path:
            yield written, path


def expanded(text: str, env: Mapping[str, str]) -> str:
    """``text`` with the values of the variables that are set."""
    return VARIABLE.sub(lambda one: env.get(one[1] or one[2], one[0]), text)


def decides(name: str) -> bool:
    """Whether the variable ``name`` may decide what a program reads, and is not of one start, nor of one run."""
    return not _OF_ONE_START.fullmatch(name) and not _OF_RUNS.fullmatch(name)


def settings_of(texts: Iterable[str], env: Mapping[str, str], *, unseen: bool) -> Iterator[tuple[str, str]]:
    """(as it is called, path) of the settings files that the installers in ``texts`` read; of those of a project, and
    those that variables name, where their opens are ``unseen``."""
    for tool in sorted(set().union(*map(tools_in, texts))):
        more = PROJECTS.get(tool, ()) if unseen else ()
        for name in _settings(_TOOLS[tool], env) if unseen else ():
            yield from ((path, path) for path in env[name].split() if "://" not in path and "\0" not in path)
        for name in (*SETTINGS.get(tool, ()), *more):
            if name.startswith("~") and not env.get("HOME"):
                continue
            path = VARIABLE.sub(lambda one: env.get(one[2], one[0]), name.replace("~", env.get("HOME", ""), 1))
            if "$" not in path:
                yield name, path
            if not name.startswith(("/", "~", "$")):  # they look in the folders above, too
                yield from ((f"{'../' * up}{name}",) * 2 for up in range(1, _ABOVE))

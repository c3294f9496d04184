"""A Kerberos realm of its own on one machine: Debian's krb5-kdc, its users and services, and what Hadoop needs of it.

with HadoopCluster(root, 3, kerberos=Realm(protection="privacy")) as cluster, cluster.realm.login("alice"):
    ...                                          # in this process and its children
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

from bootseer.errors import UnsupportedError
from support.hadoopsite import Daemon, free_ports

NAME = "BOOT.TEST"
SERVICES = ("hdfs/localhost", "dn/localhost", "HTTP/localhost", "other/localhost")
USERS = ("hdfs", "alice", "bob")
"""``hdfs`` is the superuser; the others have a folder below ``/user``."""

_KRB5 = """[libdefaults]
 default_realm = {realm}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 rdns = false
 dns_canonicalize_hostname = false
 udp_preference_limit = 1
 ticket_lifetime = 10h
 renew_lifetime = 7d
[realms]
 {realm} = {{
  kdc = 127.0.0.1:{port}
 }}
[domain_realm]
 localhost = {realm}
"""
_KDC = """[kdcdefaults]
 kdc_listen = 127.0.0.1:{port}
 kdc_tcp_listen = 127.0.0.1:{port}
[realms]
 {realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  acl_file = {folder}/kadm5.acl
  max_renewable_life = 7d
  supported_enctypes = aes256-cts-hmac-sha1-96:normal
 }}
[logging]
 kdc = FILE:{folder}/requests.log
"""


class Realm:
    """``protection``: ``dfs.data.transfer.protection`` ("": none of DataNodes), ``rpc``: ``hadoop.rpc.protection``.
    ``encrypt``: ``dfs.encrypt.data.transfer``; ``aes``: with AES, as no cluster has it by default.
    """

    def __init__(
        self,
        *,
        protection: str = "authentication",
        rpc: str = "authentication",
        encrypt: bool = False,
        aes: bool = False,
    ) -> None:
        if why := missing():
            raise UnsupportedError(why, hint="apt-get install krb5-kdc krb5-admin-server krb5-user")
        self.protection, self.rpc, self.encrypt, self.aes = protection, rpc, encrypt, aes
        self.conf: Path  # of the client of Hadoop

    def start(self, folder: Path, conf: Path) -> None:
        self.folder, self.conf = folder, conf
        folder.mkdir(parents=True, exist_ok=True)
        (port,) = free_ports("127.0.0.1", 1)
        (folder / "krb5.conf").write_text(_KRB5.format(realm=NAME, port=port))
        (folder / "kdc.conf").write_text(_KDC.format(realm=NAME, port=port, folder=folder))
        self._environment = {"KRB5_CONFIG": f"{folder}/krb5.conf", "KRB5_KDC_PROFILE": f"{folder}/kdc.conf"}
        if not (folder / "principal").exists():
            self._run("kdb5_util", "create", "-s", "-r", NAME, "-P", "master")
            wanted = [f"addprinc -randkey {who}" for who in (*SERVICES, *USERS)]
            wanted.append(f"ktadd -k {self.keytab('service')} -norandkey {' '.join(SERVICES)}")
            wanted += [f"ktadd -k {self.keytab(user)} -norandkey {user}" for user in USERS]
            self.admin("\n".join(wanted))
        argv = ["env", *(f"{key}={value}" for key, value in self._environment.items()), _program("krb5kdc")]
        self.kdc = Daemon("kdc", [*argv, "-n", "-r", NAME, "-P", f"{folder}/pid"], folder)
        self.kdc.start()
        for user in USERS:
            self.ticket(user)

    def stop(self) -> None:
        if hasattr(self, "kdc"):
            self.kdc.kill()

    @contextlib.contextmanager
    def without_kdc(self, *, frozen: bool = False) -> Iterator[None]:
        """Nobody answers, or even refuses, inside."""
        if frozen:
            self.kdc.signal(signal.SIGSTOP)
        else:
            self.kdc.kill()
        try:
            yield
        finally:
            self.kdc.signal(signal.SIGCONT) if frozen else self.kdc.start()
            self.ticket(USERS[0])  # it answers

    def requests(self) -> int:
        """How many tickets the KDC was asked for."""
        return (self.folder / "requests.log").read_text().count("_REQ")

    def keytab(self, user: str) -> Path:
        return self.folder / f"{user}.keytab"

    def admin(self, lines: str) -> None:
        """What whoever runs the KDC enters."""
        self._run("kadmin.local", "-r", NAME, text=lines)

    def ticket(self, user: str, *options: str, cache: str = "") -> Path:
        """A cache with a ticket of ``user``; ``options``: of kinit."""
        found = self.folder / (cache or f"cc_{user}")
        kinit = ["kinit", "-c", f"FILE:{found}", "-k", "-t", str(self.keytab(user)), *options, user]
        self._run(*kinit, again=20)  # the KDC was just started
        return found

    def _run(self, program: str, *argv: str, text: str = "", again: int = 0) -> None:
        done = subprocess.run(
            [_program(program), *argv],
            env={**os.environ, **self._environment},
            input=text,
            capture_output=True,
            text=True,
        )
        if done.returncode and again:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(["sleep", "0.1"], timeout=5)
            return self._run(program, *argv, text=text, again=again - 1)
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(argv)}: {done.stdout}{done.stderr}")

    def environment(self, user: str, **more: str) -> dict[str, str]:
        """What a process needs to be ``user``."""
        cache = f"FILE:{self.folder}/cc_{user}"
        return {
            "KRB5_CONFIG": f"{self.folder}/krb5.conf",
            "KRB5CCNAME": cache,
            "HADOOP_CONF_DIR": str(self.conf),
            **more,
        }

    @contextlib.contextmanager
    def login(self, user: str, **more: str) -> Iterator[None]:
        """This process is ``user`` inside; ``more``: further variables, of which an empty one is not set."""
        wanted = {key: value for key, value in self.environment(user, **more).items() if value}
        known = ("HADOOP_USER_NAME", "HADOOP_PROXY_USER", "HADOOP_TOKEN_FILE_LOCATION", "KRB5_CLIENT_KTNAME")
        kept = {key: value for key, value in os.environ.items() if key not in (*known, *more)}
        with mock.patch.dict(os.environ, {**kept, **wanted}, clear=True):
            yield

    # -- Hadoop -----------------------------------------------------------------------------------------------------

    def core(self) -> Mapping[str, str]:
        """Of ``core-site.xml``."""
        local = f"RULE:[2:$1@$0](hdfs@{NAME})s/.*/hdfs/ RULE:[2:$1@$0](dn@{NAME})s/.*/hdfs/ DEFAULT"
        return {
            "hadoop.security.authentication": "kerberos",
            "hadoop.rpc.protection": self.rpc,
            "hadoop.security.auth_to_local": local,
            **{f"hadoop.proxyuser.hdfs.{what}": "*" for what in ("hosts", "groups", "users")},
        }

    def settings(self) -> Mapping[str, str]:
        """Of ``hdfs-site.xml``."""
        found = {
            "dfs.block.access.token.enable": "true",
            "dfs.permissions.enabled": "true",
            "dfs.permissions.superusergroup": "hdfs",
            "ignore.secure.ports.for.testing": "true",
            "dfs.namenode.kerberos.principal": f"hdfs/localhost@{NAME}",
            "dfs.datanode.kerberos.principal": f"dn/localhost@{NAME}",
            "dfs.namenode.keytab.file": str(self.keytab("service")),
            "dfs.datanode.keytab.file": str(self.keytab("service")),
            "dfs.web.authentication.kerberos.principal": f"HTTP/localhost@{NAME}",
            "dfs.web.authentication.kerberos.keytab": str(self.keytab("service")),
            "dfs.data.transfer.protection": self.protection,
            "dfs.encrypt.data.transfer": str(self.encrypt).lower(),
            "dfs.encrypt.data.transfer.cipher.suites": "AES/CTR/NoPadding" if self.aes else "",
        }
        return {key: value for key, value in found.items() if value}

    def java(self) -> list[str]:
        """Options of the JVMs."""
        package = "java.security.jgss/sun.security.krb5=ALL-UNNAMED"
        return [
            f"-Djava.security.krb5.conf={self.folder}/krb5.conf",
            f"--add-opens={package}",
            f"--add-exports={package}",
        ]

    def shell(self) -> str:
        """Text for a shell that sources it."""
        lines = [f"export {key}={value}" for key, value in self.environment("alice").items()]
        return "\n".join([*lines, f"as() {{ export KRB5CCNAME=FILE:{self.folder}/cc_$1; }}", ""])


def missing() -> str:
    """What is not installed, "" when all is."""
    programs = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")
    gone = [each for each in programs if not shutil.which(_program(each))]
    return f"needs {', '.join(gone)} (scripts/setup installs them)" if gone else ""


def _program(name: str) -> str:
    return shutil.which(name) or f"/usr/sbin/{name}"

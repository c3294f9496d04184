"""System calls that a container may not use, as a seccomp profile of the runtime configuration.

Capabilities that a container lacks forbid most of these already; but keys of the kernel have no namespace, a user
namespace of its own gives a process all capabilities in it, and what a job has no use for may have errors. All other
calls are allowed, also those of later kernels: profilers (ptrace, perf_event_open), NCCL between processes
(process_vm_readv, pidfd_getfd), NUMA, io_uring."""

from __future__ import annotations

import errno
import os
from typing import Any

_ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
}
_NEW_USER = 0x10000000
_DENIED = """
    add_key keyctl request_key
    bpf userfaultfd open_by_handle_at lookup_dcookie
    mount umount umount2 mount_setattr move_mount open_tree fsopen fsconfig fsmount fspick pivot_root setns
    init_module finit_module delete_module create_module query_module get_kernel_syms
    kexec_load kexec_file_load reboot swapon swapoff acct quotactl quotactl_fd nfsservctl sysfs _sysctl uselib ustat
    settimeofday stime clock_settime clock_settime64
    ioperm iopl vm86 vm86old syslog vhangup
"""


def profile() -> dict[str, Any]:
    """``linux.seccomp`` for this machine."""
    user_namespace = {"index": 0, "value": _NEW_USER, "valueTwo": _NEW_USER, "op": "SCMP_CMP_MASKED_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": _ARCHITECTURES.get(os.uname().machine, []),
        "syscalls": [
            {"names": _DENIED.split(), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
            # in a user namespace of its own a process has all capabilities
            {"names": ["clone", "unshare"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM,
             "args": [user_namespace]},
            # its flags lie in memory, where no filter looks: C libraries use clone then
            {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        ],
    }  # fmt: skip

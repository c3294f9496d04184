/* Process 1 of a container: it starts the command, passes signals on to it, reaps what is left to it, and ends as the
 * command did. A command is not process 1 itself, for which the kernel drops what it has no handler for, its own too.
 *
 * It needs nothing of the image: no C library, no file. build.sh makes the programs beside this file. */

#if defined __x86_64__
enum { WRITE = 1, SIGACTION = 13, SIGPROCMASK = 14, CLONE = 56, EXECVE = 59, WAIT4 = 61, KILL = 62, PTRACE = 101, SIGTIMEDWAIT = 128, EXIT_GROUP = 231 };

static long call(long number, long a, long b, long c, long d)
{
    register long r10 __asm__("r10") = d;
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

__asm__(".globl _start\n_start: mov %rsp, %rdi\n and $-16, %rsp\n call first\n");

#elif defined __aarch64__
enum { WRITE = 64, EXIT_GROUP = 94, PTRACE = 117, KILL = 129, SIGACTION = 134, SIGPROCMASK = 135, SIGTIMEDWAIT = 137, CLONE = 220, EXECVE = 221, WAIT4 = 260 };

static long call(long number, long a, long b, long c, long d)
{
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3) : "memory");
    return x0;
}

__asm__(".globl _start\n_start: mov x0, sp\n b first\n");
#endif

enum { SIGHUP = 1, SIGTRAP = 5, SIGCHLD = 17, SET_MASK = 2, NO_HANG = 1, DETACH = 17, NO_ENTRY = 2, NO_ACCESS = 13, PATH_MAX = 4096 };

static void say(const char *text)
{
    long length = 0;
    while (text[length])
        length++;
    call(WRITE, 2, (long)text, length, 0);
}

static long execute(const char *path, char **argv, char **envp)
{
    return -call(EXECVE, (long)path, (long)argv, (long)envp, 0);
}

/* As execvp(3): a name without a slash is looked for in PATH. Returns the error. */
static long look(char **argv, char **envp)
{
    static char path[PATH_MAX];
    const char *from = 0;
    long error = NO_ENTRY;
    for (const char *at = argv[0]; *at; at++)
        if (*at == '/')
            return execute(argv[0], argv, envp);
    for (char **one = envp; *one; one++)
        if ((*one)[0] == 'P' && (*one)[1] == 'A' && (*one)[2] == 'T' && (*one)[3] == 'H' && (*one)[4] == '=')
            from = *one + 5;
    while (from && argv[0][0]) {
        long length = 0;
        while (*from && *from != ':' && length < PATH_MAX - 2)
            path[length++] = *from++;
        if (length)
            path[length++] = '/';
        const char *name = argv[0];
        while (*name && length < PATH_MAX - 1)
            path[length++] = *name++;
        path[length] = 0;
        if (!*name && (!*from || *from == ':')) {
            long failed = execute(path, argv, envp);
            if (failed == NO_ACCESS || (error == NO_ENTRY && failed != 20)) /* ENOTDIR */
                error = failed;
        }
        while (*from && *from != ':')
            from++;
        from = *from ? from + 1 : 0;
    }
    return error;
}

__attribute__((noreturn)) static void leave(long code)
{
    for (;;)
        call(EXIT_GROUP, code, 0, 0, 0);
}

__attribute__((noreturn, used)) void first(unsigned long *stack)
{
    char **argv = (char **)(stack + 1), **envp = argv + stack[0] + 1;
    unsigned long all = ~0UL, before, by_default[4] = {0};
    call(SIGPROCMASK, SET_MASK, (long)&all, (long)&before, 8);
    call(SIGACTION, SIGCHLD, (long)by_default, 0, 8); /* where it is ignored nobody tells us of an end */
    long child = stack[0] > 1 ? call(CLONE, SIGCHLD, 0, 0, 0) : -1;
    if (child < 0) {
        say("bootseer: cannot make a process in the container\n");
        leave(126);
    }
    if (child == 0) {
        call(SIGPROCMASK, SET_MASK, (long)&before, 0, 8);
        long error = look(argv + 1, envp);
        say("bootseer: cannot run ");
        say(argv[1]);
        say(error == NO_ENTRY    ? " in the container: no such file, or none that it needs to run\n"
            : error == NO_ACCESS ? " in the container: it is not executable\n"
                                 : " in the container: the kernel does not take it for a program\n");
        leave(error == NO_ENTRY ? 127 : 126);
    }
    for (;;) {
        int info[32]; /* siginfo_t: 0 number, 2 code, 4 process */
        long number = call(SIGTIMEDWAIT, (long)&all, (long)info, 0, 8);
        if (number == SIGCHLD) {
            int status;
            long ended;
            while ((ended = call(WAIT4, -1, (long)&status, NO_HANG, 0)) > 0)
                if ((status & 127) == 127) /* it has itself traced by us (PTRACE_TRACEME), and stopped: let it go on */
                    call(PTRACE, DETACH, ended, 0, status >> 8 == SIGTRAP ? 0 : status >> 8);
                else if (ended == child)
                    leave(status & 127 ? 128 + (status & 127) : status >> 8 & 255);
        } else if (number > 0 && ((info[2] == 0 && info[4] == 0) || (number == SIGHUP && info[2] > 0))) {
            /* From outside. What a process in here or the terminal sends to the group comes to the command itself;
             * but of the terminal's end the kernel tells us alone. */
            call(KILL, child, number, 0, 0);
        }
    }
}

/* Children that run in their parent's memory: vfork, clone, and both by their numbers. Prints what it sees; the same
 * lines must come out on stock sockets.
 *
 * usage: vfork ROUNDS PROGRAM...    programs that copy, of which the first one loads libraries
 *        vfork numbers */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define MUST(x) ((x) ? (void)0 : (fprintf(stderr, "line %d: %s: %s\n", __LINE__, #x, strerror(errno)), exit(1)))
extern char **environ;

static void pair(int s[2], int flags) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(bind(l, (void *)&a, n) == 0 && listen(l, 1) == 0 && getsockname(l, (void *)&a, &n) == 0);
    s[0] = socket(AF_INET, SOCK_STREAM | flags, 0);
    MUST(connect(s[0], (void *)&a, n) == 0 && (s[1] = accept4(l, NULL, NULL, flags)) >= 0 && close(l) == 0);
}

/* A connection both of whose ends this process has still carries bytes both ways. */
static void talk(const char *what, int s[2]) {
    char buf[16];
    for (int i = 0; i < 2; i++) {
        MUST(send(s[i], "ping", 4, 0) == 4);
        MUST(recv(s[1 - i], buf, sizeof buf, 0) == 4 && memcmp(buf, "ping", 4) == 0);
    }
    printf("%s: talks\n", what);
}

static int reap(pid_t child) {
    int status = -1;
    MUST(child > 0 && waitpid(child, &status, 0) == child);
    return status;
}

static volatile int shared;
static int in_child(void *what) { shared = *(int *)what; _exit(7); }

static void every_way(int s[2]) {
    static char stack[65536] __attribute__((aligned(16)));
    int value;
    pid_t child = vfork();
    if (child == 0) {
        shared = 1;
        close(s[0]);
        close_range(3, ~0u, 0);
        _exit(7);
    }
    printf("vfork %x shared %d\n", reap(child), shared);
    talk("vfork", s);
    value = 2;
    child = clone(in_child, stack + sizeof stack, CLONE_VM | CLONE_VFORK | SIGCHLD, &value);
    printf("clone %x shared %d\n", reap(child), shared);
    talk("clone", s);
}

/* (libc's `syscall` returns from its frame after the child has left it: on stock sockets this ends in chaos.) */
static void by_numbers(int s[2]) {
    long by_number = syscall(SYS_vfork);
    if (by_number == 0) {
        shared = 3;
        dup2(open("/dev/null", O_RDWR), s[0]);
        syscall(SYS_close, s[1]);
        _exit(7);
    }
    printf("by number %x shared %d\n", reap((pid_t)by_number), shared);
    talk("by number", s);
    by_number = syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
    if (by_number == 0) {
        shared = 4;
        closefrom(3);
        _exit(7);
    }
    printf("SYS_clone %x shared %d\n", reap((pid_t)by_number), shared);
    int pidfd = -1;
    struct clone_args args = {.flags = CLONE_VM | CLONE_VFORK | CLONE_PIDFD, .exit_signal = SIGCHLD};
    args.pidfd = (uintptr_t)&pidfd;
    by_number = syscall(SYS_clone3, &args, sizeof args);
    if (by_number == 0) {
        shared = 5;
        closefrom(3);
        _exit(7);
    }
    printf("SYS_clone3 %x shared %d pidfd %d\n", reap((pid_t)by_number), shared, pidfd >= 0 && close(pidfd) == 0);
    talk("clone3", s);
}

/* Another program, with an end of the connection as its standard input and output. */
static void program(const char *what, const char *path, int end, int s[2]) {
    char buf[64] = "";
    pid_t child = vfork();
    if (child == 0) {
        dup2(s[end], 0);
        dup2(0, 1);
        close_range(3, ~0u, 0);
        execl("/no/such/program", "no", NULL);
        execl(path, "cat", NULL);
        _exit(99);
    }
    MUST(send(s[1 - end], "through the program", 19, 0) == 19);
    MUST(recv(s[1 - end], buf, 19, MSG_WAITALL) == 19);
    close(s[end]);
    shutdown(s[1 - end], SHUT_WR);
    printf("%s: %s, ends %zd, %x\n", what, buf, recv(s[1 - end], buf, 1, 0), reap(child));
    close(s[1 - end]);
}

/* The child itself uses the connection. */
static void used(int s[2]) {
    char buf[8] = "";
    MUST(send(s[1], "ahead", 5, 0) == 5);
    pid_t child = vfork();
    if (child == 0) {
        char got[8];
        int n = dup(s[0]);
        _exit(!(write(n, "mine", 4) == 4 && read(s[0], got, 5) == 5 && memcmp(got, "ahead", 5) == 0));
    }
    int status = reap(child);
    MUST(recv(s[1], buf, 4, MSG_WAITALL) == 4);
    printf("used by the child: %x %s\n", status, buf);
    talk("after that", s);
}

static void ends(int s[2]) {
    pid_t child = vfork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        raise(SIGKILL);
    }
    printf("killed %x\n", reap(child));
    child = vfork();
    if (child == 0) {
        pid_t inner = vfork();
        if (inner == 0) {
            close(s[0]);
            execl("/bin/true", "true", NULL);
        }
        int status;
        waitpid(inner, &status, 0);
        _exit(status == 0 ? 3 : 4);
    }
    printf("nested %x\n", reap(child));
    child = vfork();
    if (child == 0) {
        pid_t inner = fork();
        if (inner == 0) {
            close(s[0]);
            execl("/bin/true", "true", NULL);
        }
        int status;
        waitpid(inner, &status, 0);
        _exit(status == 0 ? 3 : 4);
    }
    printf("forked %x\n", reap(child));
    MUST(posix_spawn(&child, "/bin/true", NULL, NULL, (char *[]){"true", NULL}, environ) == 0);
    printf("spawned %x system %x\n", reap(child), system("exit 3"));
    talk("ends", s);
}

static atomic_int over;
static atomic_long turns, signals;
static int signalled[2];

static void on_signal(int n) {
    char c;
    (void)n;
    int e = errno;
    MUST(send(signalled[0], "s", 1, 0) == 1 && recv(signalled[1], &c, 1, 0) == 1);
    signals++;
    errno = e;
}

static void *talker(void *arg) {
    int *s = arg;
    char out[3000], in[3000];
    memset(out, 'x', sizeof out);
    while (!over) {
        MUST(send(s[0], out, sizeof out, 0) == sizeof out);
        MUST(recv(s[1], in, sizeof in, MSG_WAITALL) == sizeof in && memcmp(in, out, sizeof in) == 0);
        turns++;
    }
    return NULL;
}

static void *opener(void *arg) {
    (void)arg;
    while (!over) {
        int s[2];
        char c;
        pair(s, SOCK_CLOEXEC);
        MUST(send(s[0], "o", 1, 0) == 1 && recv(s[1], &c, 1, 0) == 1);
        close(s[0]);
        close(s[1]);
        turns++;
    }
    return NULL;
}

static void *starter(void *rounds) {
    for (volatile int i = 0; i < *(int *)rounds; i++) {
        pid_t child = vfork();
        if (child == 0) {
            close_range(3, ~0u, 0);
            if (i % 3 == 0) _exit(0);
            execl(i % 3 == 1 ? "/bin/true" : "/no/such/program", "true", NULL);
            _exit(0);
        }
        MUST(reap(child) == 0);
    }
    return NULL;
}

static void stress(int rounds) {
    pthread_t t[5];
    int s[2][2];
    pair(s[0], SOCK_CLOEXEC);
    pair(s[1], 0);
    pair(signalled, SOCK_CLOEXEC);
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &a, NULL);
    struct itimerval timer = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &timer, NULL);
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    /* The threads that start children get the signals. */
    MUST(pthread_create(&t[0], NULL, starter, &rounds) == 0 && pthread_create(&t[1], NULL, starter, &rounds) == 0);
    pthread_sigmask(SIG_BLOCK, &alarm, NULL);
    MUST(pthread_create(&t[2], NULL, talker, s[0]) == 0 && pthread_create(&t[3], NULL, opener, NULL) == 0);
    MUST(pthread_create(&t[4], NULL, talker, s[1]) == 0);
    pthread_join(t[0], NULL);
    pthread_join(t[1], NULL);
    over = 1;
    for (int i = 2; i < 5; i++) pthread_join(t[i], NULL);
    timer = (struct itimerval){0};
    setitimer(ITIMER_REAL, &timer, NULL);
    printf("stress: %s\n", turns > 0 && signals > 0 ? "all went on" : "nobody went on");
}

int main(int argc, char **argv) {
    int s[2], rounds = argc > 1 ? atoi(argv[1]) : 100;
    setvbuf(stdout, NULL, _IONBF, 0);
    pair(s, SOCK_CLOEXEC);
    if (rounds == 0) {
        by_numbers(s);
        puts("ok");
        return 0;
    }
    every_way(s);
    ends(s);
    stress(rounds);
    talk("before the programs", s);
    used(s);
    for (int end = 0; end < 2; end++) {
        for (int i = 2; i < argc; i++) {
            pair(s, i % 2 ? 0 : SOCK_CLOEXEC);
            program(i == 2 ? "loads" : "does not load", argv[i], end, s);
        }
    }
    puts("ok");
    return 0;
}

/* A program's own handlers of SIGSEGV and SIGBUS, beside bad arguments of calls: a transcript, the
 * same on stock sockets and on ours. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int c, p;
static char *none;
static sigjmp_buf back;
static volatile sig_atomic_t calls, number, on_stack, blocked, code, at_none;
static char stack[1 << 16];

static void handler(int n, siginfo_t *info, void *context) {
    (void)context;
    sigset_t now;
    stack_t s;
    char here;
    calls++, number = n;
    code = info->si_code, at_none = info->si_addr == none;
    sigaltstack(NULL, &s);
    on_stack = (s.ss_flags & SS_ONSTACK) != 0 && &here >= stack && &here < stack + sizeof stack;
    sigprocmask(SIG_BLOCK, NULL, &now);
    blocked = sigismember(&now, n) * 2 + sigismember(&now, SIGUSR1);
    siglongjmp(back, 1);
}
static void plain(int n) { calls++, number = n; siglongjmp(back, 1); }
static void goes_on(int n) { calls++, number = n; mprotect(none, 4096, PROT_READ | PROT_WRITE); }

static void efault(void) {
    char b[8];
    errno = 0;
    long r = send(c, none, 8, 0), s = send(c, none, 500, 0), t = recv(c, none, 3, 0);
    printf("  bad arguments %ld %ld %ld %s", r, s, t, strerrorname_np(errno));
    printf(", good ones %zd\n", recv(c, b, 3, 0));
}
static void touch(const char *what) {
    calls = number = on_stack = blocked = code = at_none = 0;
    if (!sigsetjmp(back, 1)) *(volatile char *)none = 1;
    printf("%s: %d calls, signal %d code %d at %d on_stack %d blocked %d\n", what, calls, number, code, at_none, on_stack, blocked);
    efault();
}
static void set(int flags, void *f) {
    struct sigaction a = {.sa_sigaction = f, .sa_flags = flags}, old, now;
    sigaddset(&a.sa_mask, SIGUSR1);
    sigaction(SIGSEGV, &a, &old);
    sigaction(SIGSEGV, NULL, &now);
    printf("was %s%s%s now %s flags %x mask %d\n", old.sa_sigaction == handler ? "handler" : "", (void *)old.sa_handler == plain ? "plain" : "",
           old.sa_handler == SIG_DFL ? "default" : "", (void *)now.sa_sigaction == f ? "as set" : "another", now.sa_flags, sigismember(&now.sa_mask, SIGUSR1));
}
static int deep(int n) { volatile char x[512]; x[n % 512] = 1; return deep(n + 1) + x[0]; }

static void setup(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    bind(l, (void *)&a, n), listen(l, 8), getsockname(l, (void *)&a, &n);
    p = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(p, (void *)&a, n) || (c = accept(l, NULL, NULL)) < 0) abort();
    for (int i = 0; i < 20; i++) if (write(p, "0123456789", 10) != 10) abort();
    if (write(c, "x", 1) != 1) abort();
    usleep(10000);
    none = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* `f` in a child: how it ends. */
static void child(const char *what, void (*f)(void)) {
    printf("%s: ", what);
    fflush(stdout);
    pid_t pid = fork();
    if (!pid) { alarm(20), f(), fflush(stdout), _exit(0); }
    int s;
    waitpid(pid, &s, 0);
    if (WIFSIGNALED(s)) printf("signal %d\n", WTERMSIG(s)); else printf("status %d\n", WEXITSTATUS(s));
}
static void c_default(void) { efault(), fflush(stdout), *(volatile char *)none = 1; }
static void c_killed(void) { efault(), fflush(stdout), kill(getpid(), SIGSEGV), pause(); }
static void c_raised(void) { efault(), fflush(stdout), raise(SIGBUS), pause(); }
static void c_ignored(void) { signal(SIGBUS, SIG_IGN); raise(SIGBUS); printf("ignored\n"); }
static void c_ignored_fault(void) { signal(SIGSEGV, SIG_IGN); *(volatile char *)none = 1; }
static void c_once(void) { set(SA_SIGINFO | SA_RESETHAND, handler), touch("once"), fflush(stdout), touch("twice"); }
static void c_overflow(void) { fflush(stdout), deep(0); }
static void c_queued(void) {
    set(SA_SIGINFO, handler);
    union sigval v = {.sival_int = 7};
    if (!sigsetjmp(back, 1)) sigqueue(getpid(), SIGSEGV, v), pause();
    printf("code %d signal %d\n", code, number);
}
static void c_sysv(void) {
    printf("%d\n", sysv_signal(SIGSEGV, plain) == SIG_DFL), touch("sysv"), fflush(stdout), touch("again");
}
static void c_exec(void) { execl("/bin/sh", "sh", "-c", "kill -SEGV $$", NULL); }
static void c_raw(void) {
    struct { void *h; unsigned long flags; void *r; unsigned long mask; } old = {(void *)1};
    long r = syscall(SYS_rt_sigaction, SIGSEGV, NULL, &old, 8L);
    printf("%ld %d %lx\n", r, old.h == NULL, old.flags & ~0x04000000UL), touch("raw");
}
static void *threads(void *x) {
    char b[8];
    for (int i = 0; i < 2000; i++) if (send(c, none, 8 + i % 900, 0) >= 0 || errno != EFAULT || recv(c, NULL, 3, 0) >= 0) abort();
    (void)b;
    return x;
}
static void c_threads(void) {
    pthread_t t[4];
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, threads, NULL);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    efault();
}

int main(int n, char **v) {
    stack_t s = {.ss_sp = stack, .ss_size = sizeof stack};
    alarm(60);
    /* Before the first socket over shared memory, and after it. */
    if (n > 1) set(SA_SIGINFO, handler);
    setup();
    efault();
    child("default", c_default), child("killed", c_killed), child("raised", c_raised);
    child("ignored", c_ignored), child("ignored fault", c_ignored_fault), child("overflow", c_overflow);
    child("exec", c_exec), child("raw", c_raw), child("threads", c_threads), child("sysv", c_sysv);
    set(SA_SIGINFO, handler), touch("handler");
    set(SA_SIGINFO | SA_NODEFER, handler), touch("not deferred");
    sigaltstack(&s, NULL);
    set(SA_SIGINFO | SA_ONSTACK, handler), touch("on a stack of its own");
    if (!sigsetjmp(back, 1)) deep(0);
    printf("overflow: signal %d on_stack %d\n", number, on_stack);
    efault();
    child("once", c_once), child("queued", c_queued);
    printf("%d\n", signal(SIGSEGV, plain) == (void *)handler), touch("signal");
    signal(SIGSEGV, goes_on), calls = 0, none[0] = 1;
    printf("goes on: %d calls, %d\n", calls, none[0]);
    mprotect(none, 4096, PROT_NONE);
    efault();
    signal(SIGSEGV, SIG_DFL);
    efault();
    child("default again", c_default);
    printf("ok\n");
    return v == NULL;
}

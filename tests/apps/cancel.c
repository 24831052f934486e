/* Cancels threads, or makes them leave by siglongjmp, while they wait on sockets. Prints a
 * transcript of what happened.
 *
 *     cancel [cancel|jump|kernel]
 *
 * "kernel" is "cancel" with clients that set SO_REUSEPORT and bind before they connect: such
 * connections have rules of their own.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *const names[] = {"recv",   "read", "readv", "recvfrom", "recvmsg", "recvmmsg",   "send", "write", "writev",
                                    "sendmsg", "poll", "ppoll", "select",   "pselect", "epoll_wait", "epoll_pwait", "accept"};
enum { RECV, READ, READV, RECVFROM, RECVMSG, RECVMMSG, SEND, WRITE, WRITEV, SENDMSG, POLL, PPOLL, SELECT, PSELECT,
       EPOLL_WAIT, EPOLL_PWAIT, ACCEPT, OPERATIONS };

static struct sockaddr_in address;
static int listener, c, s, ep, bound;
static char big[1 << 20];

static void check(int ok, const char *what) {
    if (!ok) {
        printf("FAILED %s: %s\n", what, strerror(errno));
        exit(1);
    }
}
static void pause_ms(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    while (nanosleep(&t, &t) < 0) {}
}

/* Does the operation wait for room in the send buffer? */
static int sends(int op) { return op >= SEND && op <= SENDMSG; }

/* Makes a call that waits until something ends the wait. Returns the result of the call. */
static long operate(int op) {
    char b[8];
    struct iovec v = {b, sizeof b}, w = {big, sizeof big};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    struct mmsghdr mm = {.msg_hdr = m};
    struct pollfd p = {s, POLLIN, 0};
    struct epoll_event ev;
    fd_set set;
    FD_ZERO(&set);
    FD_SET(s, &set);
    switch (op) {
    case RECV: return recv(s, b, sizeof b, 0);
    case READ: return read(s, b, sizeof b);
    case READV: return readv(s, &v, 1);
    case RECVFROM: return recvfrom(s, b, sizeof b, 0, 0, 0);
    case RECVMSG: return recvmsg(s, &m, 0);
    case RECVMMSG: return recvmmsg(s, &mm, 1, 0, 0);
    case POLL: return poll(&p, 1, -1);
    case PPOLL: return ppoll(&p, 1, 0, 0);
    case SELECT: return select(s + 1, &set, 0, 0, 0);
    case PSELECT: return pselect(s + 1, &set, 0, 0, 0, 0);
    case EPOLL_WAIT: return epoll_wait(ep, &ev, 1, -1);
    case EPOLL_PWAIT: return epoll_pwait(ep, &ev, 1, -1, 0);
    case ACCEPT: return accept(listener, 0, 0);
    }
    m.msg_iov = &w;
    for (;;)
        switch (op) {
        case SEND: send(s, big, sizeof big, 0); break;
        case WRITE: write(s, big, sizeof big); break;
        case WRITEV: writev(s, &w, 1); break;
        default: sendmsg(s, &m, 0);
        }
}

static void open_all(void) {
    socklen_t len = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = 0;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 16) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &len);
}
static int connected(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct timeval limit = {10, 0};
    struct sockaddr_in here = address;
    here.sin_port = 0;
    check(!bound || (setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &bound, sizeof bound) == 0 &&
                     bind(fd, (struct sockaddr *)&here, sizeof here) == 0), "bind");
    check(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}
static void pair(void) {
    struct epoll_event ev = {.events = EPOLLIN};
    c = connected();
    s = accept(listener, 0, 0);
    ep = epoll_create1(0);
    check(s >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, s, &ev) == 0, "accept");
}

/* Checks that the sockets still work, and that no thread has kept anything locked. */
static void still_good(int op) {
    char b[8] = "";
    if (op == ACCEPT) {
        int x = connected(), y = accept(listener, 0, 0);
        printf("  accept %d\n", y >= 0);
        close(x);
        close(y);
    }
    if (sends(op)) {
        /* The peer receives the earlier bytes first, and then the end of the stream. */
        long total = 0, n;
        close(s);
        while ((n = recv(c, big, sizeof big, 0)) > 0)
            total += n;
        printf("  drained %d, end %ld\n", total > 0, n);
    } else {
        send(c, "after", 5, 0);
        printf("  recv %ld", (long)recv(s, b, 5, 0));
        printf(" %s\n", b);
        send(s, "back", 4, 0);
        printf("  back %ld\n", (long)recv(c, b, sizeof b, 0));
        close(s);
        printf("  end %ld\n", (long)recv(c, b, sizeof b, 0));
    }
    close(c);
    close(ep);
}

/* --- cancellation -------------------------------------------------------- */

struct job {
    int op, kind, state, before, cleaned;
    long result;
    volatile int ready, asked;
};

static void clean(void *p) {
    struct job *j = p;
    char b[4];
    j->cleaned++;
    /* The cleanup handler may use sockets. It does not where the test counts bytes. */
    if (!j->before && !sends(j->op) && j->op != ACCEPT)
        j->cleaned += recv(s, b, sizeof b, MSG_DONTWAIT) < 0 && errno == EAGAIN;
    else
        j->cleaned++;
}

static void *work(void *p) {
    struct job *j = p;
    pthread_cleanup_push(clean, j);
    pthread_setcancelstate(j->state, 0);
    pthread_setcanceltype(j->kind, 0);
    j->ready = 1;
    while (j->before && !j->asked)
        sched_yield();
    j->result = operate(j->op);
    if (j->state == PTHREAD_CANCEL_DISABLE) {
        printf("  not cancelled: %ld\n", j->result > 0 ? 1 : j->result);
        if (j->op >= POLL) {
            char b[8];
            recv(s, b, sizeof b, 0);
        }
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, 0);
        operate(j->op);
    }
    pthread_cleanup_pop(0);
    return 0;
}

static void join(pthread_t t, struct job *j) {
    struct timespec until;
    void *r = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    int e = pthread_timedjoin_np(t, &r, &until);
    printf("  joined %d, cancelled %d, cleaned %d\n", e, r == PTHREAD_CANCELED, j->cleaned);
    fflush(stdout);
    if (e)
        exit(1);
}

static void cancelled(int op, int kind, int state) {
    struct job j = {.op = op, .kind = kind, .state = state};
    pthread_t t;
    pair();
    printf("%s %s%s\n", names[op], kind == PTHREAD_CANCEL_ASYNCHRONOUS ? "asynchronous" : "deferred",
           state == PTHREAD_CANCEL_DISABLE ? " disabled" : "");
    pthread_create(&t, 0, work, &j);
    while (!j.ready) pause_ms(1);
    pause_ms(sends(op) ? 60 : 15);
    pthread_cancel(t);
    if (state == PTHREAD_CANCEL_DISABLE) {
        pause_ms(15);
        send(c, "go", 2, 0);
    }
    join(t, &j);
    still_good(op);
}

static void *receive_one(void *p) {
    char b[4] = "";
    *(long *)p = recv(s, b, sizeof b, 0);
    return 0;
}

static void cancel_all(void) {
    for (int op = 0; op < OPERATIONS; op++) {
        cancelled(op, PTHREAD_CANCEL_DEFERRED, PTHREAD_CANCEL_ENABLE);
        cancelled(op, PTHREAD_CANCEL_ASYNCHRONOUS, PTHREAD_CANCEL_ENABLE);
        if (!sends(op) && op != ACCEPT)
            cancelled(op, PTHREAD_CANCEL_DEFERRED, PTHREAD_CANCEL_DISABLE);
    }
    /* The thread does not wait. It is cancelled in its next call, and the bytes remain unread. */
    printf("before the call\n");
    struct job j = {.op = RECV, .before = 1};
    pthread_t t, u;
    char b[4];
    pair();
    send(c, "here", 4, 0);
    pause_ms(5);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, 0);
    pthread_create(&t, 0, work, &j);
    pthread_cancel(t);
    j.asked = 1;
    join(t, &(struct job){0});
    printf("  left %ld\n", (long)recv(s, b, 4, 0));
    close(s);
    close(c);
    close(ep);
    /* Two threads wait for the same bytes, and one of them is cancelled. */
    printf("one of two\n");
    long got = -1;
    struct job k = {.op = RECV};
    pair();
    pthread_create(&t, 0, work, &k);
    pthread_create(&u, 0, receive_one, &got);
    pause_ms(20);
    pthread_cancel(t);
    join(t, &k);
    send(c, "you", 3, 0);
    pthread_join(u, 0);
    printf("  other %ld\n", got);
    still_good(RECV);
    /* Waits on descriptors that are not TCP sockets. */
    int pipes[2];
    check(pipe(pipes) == 0, "pipe");
    for (int op = RECV; op <= SELECT; op++) {
        if (op != READ && op != READV && op != POLL && op != SELECT)
            continue;
        struct job l = {.op = op};
        s = pipes[0];
        printf("pipe %s\n", names[op]);
        pthread_create(&t, 0, work, &l);
        pause_ms(15);
        pthread_cancel(t);
        void *r;
        pthread_join(t, &r);
        printf("  cancelled %d\n", r == PTHREAD_CANCELED);
    }
}

/* --- siglongjmp ---------------------------------------------------------- */

static sigjmp_buf there;
static void jump(int signal) {
    (void)signal;
    siglongjmp(there, 1);
}

static void jumped(int op, int times) {
    struct itimerval soon = {.it_value = {0, 3000}}, never = {0};
    volatile int jumps = 0;
    pair();
    if (sends(op)) {
        /* Fill the send buffer, so that each send has to wait. */
        while (send(s, big, sizeof big, MSG_DONTWAIT) > 0) {}
    }
    for (volatile int i = 0; i < times; i++) {
        if (sigsetjmp(there, 1)) {
            jumps++;
            continue;
        }
        setitimer(ITIMER_REAL, &soon, 0);
        operate(op);
        setitimer(ITIMER_REAL, &never, 0);
    }
    printf("%s left %d times\n", names[op], jumps);
    still_good(op);
}

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IOLBF, 0);
    open_all();
    bound = argc > 1 && !strcmp(argv[1], "kernel");
    if (argc > 1 && !strcmp(argv[1], "jump")) {
        struct sigaction a = {.sa_handler = jump};
        sigaction(SIGALRM, &a, 0);
        /* Jump out of more waits than the library has wakers. */
        for (int op = 0; op < OPERATIONS; op++)
            jumped(op, op == POLL || op == EPOLL_WAIT || op == ACCEPT ? 300 : 20);
    } else {
        cancel_all();
    }
    printf("ok\n");
    return 0;
}

/* Sockets on an io_uring: what each operation returned, as a transcript.
 *
 *     cc uring.c -luring            rings by liburing
 *     cc -DRAW uring.c              rings by syscall(2)
 *     cc -DRAW -DPOLLED uring.c     likewise, and a kernel thread takes the entries
 *     cc -DINLINE uring.c           rings by system calls of its own (x86-64)
 *
 *     uring [files|workers|children|epoll [failing]]   "children": forked processes make rings of their own,
 *                                   in the place of a file that their parent had; "files": the ring reads files only; "workers": several
 *                                   processes accept from one listener, each by its ring;
 *                                   "epoll": it fills an instance, as libuv does
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORKERS = 4 };

static void check(int ok, const char *what) {
    if (!ok) {
        printf("FAILED %s: %s\n", what, strerror(errno));
        exit(1);
    }
}

#if defined(RAW) || defined(INLINE)

#ifdef INLINE
static long call(long n, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (r < 0) {
        errno = -r;
        return -1;
    }
    return r;
}
#else
#define call syscall
#endif

#ifdef POLLED
#define FLAGS IORING_SETUP_SQPOLL
#define WAKE IORING_ENTER_SQ_WAKEUP
#else
#define FLAGS 0
#define WAKE 0
#endif

static int ring;
static unsigned *sq_head, *sq_tail, *sq_array, sq_mask, *cq_head, *cq_tail, cq_mask, ready;
static struct io_uring_sqe *sqes;
static struct io_uring_cqe *cqes;

static void setup(void) {
    struct io_uring_params p;
    memset(&p, 0, sizeof p);
    p.flags = FLAGS;
    ring = call(SYS_io_uring_setup, 16, (long)&p, 0, 0, 0, 0);
    check(ring >= 0, "io_uring_setup");
    char *sq = mmap(0, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                    IORING_OFF_SQ_RING);
    char *cq = mmap(0, p.cq_off.cqes + p.cq_entries * sizeof *cqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                    ring, IORING_OFF_CQ_RING);
    sqes = mmap(0, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                IORING_OFF_SQES);
    check(sq != MAP_FAILED && cq != MAP_FAILED && sqes != MAP_FAILED, "mmap");
    sq_head = (unsigned *)(sq + p.sq_off.head);
    sq_tail = (unsigned *)(sq + p.sq_off.tail);
    sq_mask = *(unsigned *)(sq + p.sq_off.ring_mask);
    sq_array = (unsigned *)(sq + p.sq_off.array);
    cq_head = (unsigned *)(cq + p.cq_off.head);
    cq_tail = (unsigned *)(cq + p.cq_off.tail);
    cq_mask = *(unsigned *)(cq + p.cq_off.ring_mask);
    cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);
}
static struct io_uring_sqe *entry(void) {
    unsigned at = (*sq_tail + ready++) & sq_mask;
    sq_array[at] = at;
    memset(&sqes[at], 0, sizeof sqes[at]);
    return &sqes[at];
}
static void submit(void) {
    unsigned n = ready;
    ready = 0;
    __atomic_store_n(sq_tail, *sq_tail + n, __ATOMIC_RELEASE);
    check(call(SYS_io_uring_enter, ring, n, 0, WAKE, 0, 8) == n, "io_uring_enter");
}
static int result(unsigned long *data) {
    while (*cq_head == __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE))
        check(call(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, 0, 8) >= 0, "io_uring_enter");
    struct io_uring_cqe *e = &cqes[*cq_head & cq_mask];
    int r = e->res;
    *data = e->user_data;
    __atomic_store_n(cq_head, *cq_head + 1, __ATOMIC_RELEASE);
    return r;
}
static int register_file(int fd) { return call(SYS_io_uring_register, ring, IORING_REGISTER_FILES, (long)&fd, 1, 0, 0); }
static void teardown(void) { close(ring); }

#else
#include <liburing.h>

static struct io_uring ring;
static void setup(void) { check(io_uring_queue_init(16, &ring, 0) == 0, "io_uring_queue_init"); }
static struct io_uring_sqe *entry(void) {
    struct io_uring_sqe *e = io_uring_get_sqe(&ring);
    memset(e, 0, sizeof *e);
    return e;
}
static void submit(void) { check(io_uring_submit(&ring) > 0, "io_uring_submit"); }
static int result(unsigned long *data) {
    struct io_uring_cqe *e;
    check(io_uring_wait_cqe(&ring, &e) == 0, "io_uring_wait_cqe");
    int r = e->res;
    *data = e->user_data;
    io_uring_cqe_seen(&ring, e);
    return r;
}
static int register_file(int fd) { return io_uring_register_files(&ring, &fd, 1); }
static void teardown(void) { io_uring_queue_exit(&ring); }
#endif

static struct io_uring_sqe *prepare(int op, int fd, const void *addr, unsigned len, unsigned long data) {
    struct io_uring_sqe *e = entry();
    e->opcode = op;
    e->fd = fd;
    e->addr = (unsigned long)addr;
    e->len = len;
    e->user_data = data;
    return e;
}
/* One operation and its result. */
static int run(int op, int fd, const void *addr, unsigned len) {
    unsigned long data;
    prepare(op, fd, addr, len, 1);
    submit();
    return result(&data);
}

static struct sockaddr_in address;
static int listener;

static int connect_by_libc(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    check(fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) == 0, "connect");
    struct timeval limit = {10, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    return fd;
}
static void listen_somewhere(void) {
    socklen_t len = sizeof address;
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = 0;
    listener = socket(AF_INET, SOCK_STREAM, 0);
    check(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 16) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &len);
}
static void pair(int *c, int *s) {
    *c = connect_by_libc();
    *s = accept(listener, 0, 0);
    check(*s >= 0, "accept");
}
static void said(const char *what, int r, const char *bytes) {
    printf("%s: %d", what, r < 0 ? r : (bytes || r == 0) ? r : 1);
    if (bytes && r > 0)
        printf(" %.*s", r, bytes);
    printf("\n");
    fflush(stdout);
}

static void worker(int start) {
    char b[8];
    alarm(30);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setup();
    check(read(start, b, 1) == 1, "read");
    for (;;) {
        int s = run(IORING_OP_ACCEPT, listener, 0, 0);
        check(s >= 0, "accept");
        int n = run(IORING_OP_RECV, s, b, sizeof b);
        check(run(IORING_OP_SEND, s, b, n) == n, "send");
        check(run(IORING_OP_CLOSE, s, 0, 0) == 0, "close");
    }
}

/* Some clients are there before anybody accepts, and all workers begin at once. The
 * listener is as it was afterwards. */
static void serve_by_workers(void) {
    int c[20], answered = 0, start[2];
    pid_t w[WORKERS];
    struct tcp_info info;
    socklen_t len = sizeof info;
    char b[8];
    check(pipe(start) == 0, "pipe");
    listen_somewhere();
    for (int i = 0; i < 20; i++) {
        if (i == 8)
            for (int k = 0; k < WORKERS; k++)
                if ((w[k] = fork()) == 0)
                    worker(start[0]);
        if (i == 12)
            check(write(start[1], "start!!!", WORKERS) == WORKERS, "write");
        c[i] = connect_by_libc();
        check(send(c[i], "question", 8, 0) == 8, "send");
    }
    for (int i = 0; i < 20; i++) {
        answered += recv(c[i], b, sizeof b, MSG_WAITALL) == 8 && !memcmp(b, "question", 8);
        said("end", recv(c[i], b, sizeof b, 0), b);
        close(c[i]);
    }
    printf("answered %d\n", answered);
    check(getsockopt(listener, IPPROTO_TCP, TCP_INFO, &info, &len) == 0, "TCP_INFO");
    printf("backlog %u\n", info.tcpi_sacked);
    for (int k = 0; k < WORKERS; k++) {
        kill(w[k], SIGTERM);
        check(waitpid(w[k], 0, 0) == w[k], "waitpid");
    }
}

static int ctl(int ep, int op, int fd, unsigned events) {
    static struct epoll_event ev;
    unsigned long data;
    ev.events = events;
    ev.data.u64 = events;
    prepare(IORING_OP_EPOLL_CTL, ep, &ev, op, 1)->off = fd;
    submit();
    return result(&data);
}
static void wait_for(int ep, const char *what, int timeout) {
    struct epoll_event ev = {0};
    int n = epoll_wait(ep, &ev, 1, timeout);
    printf("%s: %d events %x data %x\n", what, n, ev.events, (unsigned)ev.data.u64);
}
static void an_instance_is_filled(int failing) {
    char b[100];
    int ep = epoll_create1(0);
    said("add the listener", ctl(ep, EPOLL_CTL_ADD, listener, EPOLLIN), 0);
    wait_for(ep, "nobody", 0);
    int c = connect_by_libc();
    wait_for(ep, "somebody", 5000);
    int s = accept(listener, 0, 0);
    check(s >= 0, "accept");
    said("add", ctl(ep, EPOLL_CTL_ADD, s, EPOLLIN | EPOLLET), 0);
    wait_for(ep, "nothing", 0);
    send(c, "one", 3, 0);
    wait_for(ep, "something", 5000);
    said("recv", recv(s, b, sizeof b, 0), b);
    said("change", ctl(ep, EPOLL_CTL_MOD, s, EPOLLIN | EPOLLOUT), 0);
    wait_for(ep, "room", 5000);
    said("change", ctl(ep, EPOLL_CTL_MOD, s, EPOLLIN | EPOLLRDHUP), 0);
    shutdown(c, SHUT_WR);
    wait_for(ep, "end", 5000);
    said("remove", ctl(ep, EPOLL_CTL_DEL, s, 0), 0);
    wait_for(ep, "removed", 0);
    /* Two at once, and one in a chain. */
    int c2 = connect_by_libc(), s2 = accept(listener, 0, 0);
    struct epoll_event ev = {.events = EPOLLOUT, .data.u64 = 7};
    unsigned long data;
    prepare(IORING_OP_EPOLL_CTL, ep, &ev, EPOLL_CTL_ADD, 1)->off = c2;
    prepare(IORING_OP_EPOLL_CTL, ep, &ev, EPOLL_CTL_ADD, 2)->off = s2;
    submit();
    said("first", result(&data), 0);
    said("second", result(&data), 0);
    said("remove", ctl(ep, EPOLL_CTL_DEL, c2, 0), 0);
    wait_for(ep, "the other one", 5000);
    if (!failing)
        return;
    said("add again", ctl(ep, EPOLL_CTL_ADD, s2, EPOLLIN), 0);
    wait_for(ep, "still", 5000);
    /* As libuv goes on when it is told so. */
    said("change", ctl(ep, EPOLL_CTL_MOD, s2, EPOLLIN), 0);
    wait_for(ep, "changed", 0);
    send(c2, "two", 3, 0);
    wait_for(ep, "something", 5000);
    said("change what is not there", ctl(ep, EPOLL_CTL_MOD, s, EPOLLIN), 0);
    said("add the listener again", ctl(ep, EPOLL_CTL_ADD, listener, EPOLLIN), 0);
    said("remove", ctl(ep, EPOLL_CTL_DEL, s2, 0), 0);
    said("remove again", ctl(ep, EPOLL_CTL_DEL, s2, 0), 0);
    wait_for(ep, "nothing", 0);
}

/* Each child's first connection goes on by a ring that its parent never had. */
static void children_with_rings(void) {
    char b[100];
    int file = open("/dev/null", O_RDONLY);
    listen_somewhere();
    for (int i = 0; i < 3; i++) {
        if (fork() == 0) {
            close(file);
            setup();
            int c = connect_by_libc();
            int n = run(IORING_OP_RECV, c, b, sizeof b);
            exit(n == 7 && run(IORING_OP_SEND, c, b, 7) == 7 ? 0 : 1);
        }
        int s = accept(listener, 0, 0), status;
        check(s >= 0, "accept");
        said("send", send(s, "welcome", 7, 0), 0);
        said("recv", recv(s, b, 7, MSG_WAITALL), b);
        close(s);
        wait(&status);
        said("child", status, 0);
    }
    close(file);
}

int main(int argc, char **argv) {
    char b[100];
    int c, s, c2, s2;
    unsigned long data;
    alarm(30);
    if (argc > 1 && !strcmp(argv[1], "workers")) {
        serve_by_workers();
        printf("ok\n");
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "children")) {
        children_with_rings();
        printf("ok\n");
        return 0;
    }
    setup();
    listen_somewhere();

    if (argc > 1 && !strcmp(argv[1], "files")) {
        int f = open("/proc/self/comm", O_RDONLY);
        for (int i = 0; i < 20; i++) {
            pair(&c, &s);
            b[0] = 0;
            said("file", run(IORING_OP_READ, f, b, 5), b);
            said("send", send(c, b, 5, 0), 0);
            said("recv", recv(s, b, sizeof b, 0), b);
            close(c);
            close(s);
        }
        teardown();
        printf("ok\n");
        return 0;
    }

    if (argc > 1 && !strcmp(argv[1], "epoll")) {
        an_instance_is_filled(argc > 2);
        teardown();
        printf("ok\n");
        return 0;
    }

    /* A connection with unread bytes. */
    pair(&c, &s);
    send(c, "unread", 6, 0);
    said("recv on the ring", run(IORING_OP_RECV, s, b, sizeof b), b);
    said("send on the ring", run(IORING_OP_SEND, s, "answer", 6), 0);
    said("recv", recv(c, b, sizeof b, 0), b);
    /* Waiting on the ring while the other side sends. */
    prepare(IORING_OP_RECV, s, b, sizeof b, 7);
    submit();
    send(c, "later", 5, 0);
    said("recv that waited", result(&data), b);
    /* poll */
    struct io_uring_sqe *e = prepare(IORING_OP_POLL_ADD, s, 0, 0, 8);
    e->poll32_events = POLLIN;
    submit();
    send(c, "x", 1, 0);
    said("poll", result(&data), 0);
    said("read", read(s, b, sizeof b), b);
    said("shutdown", run(IORING_OP_SHUTDOWN, s, 0, SHUT_WR), 0);
    said("end", recv(c, b, sizeof b, 0), b);
    said("close", run(IORING_OP_CLOSE, s, 0, 0), 0);
    said("again", recv(s, b, sizeof b, 0) < 0 ? -errno : 0, 0);
    close(c);
    /* Both ends on the ring, a send and a close in one chain. */
    pair(&c, &s);
    prepare(IORING_OP_SEND, s, "last", 4, 1)->flags = IOSQE_IO_LINK;
    prepare(IORING_OP_CLOSE, s, 0, 0, 2);
    submit();
    said("linked send", result(&data), 0);
    said("linked close", result(&data), 0);
    said("recv", run(IORING_OP_RECV, c, b, sizeof b), b);
    said("end", run(IORING_OP_RECV, c, b, sizeof b), b);
    close(c);
    /* A registered descriptor. */
    pair(&c, &s);
    said("register", register_file(s), 0);
    send(c, "fixed", 5, 0);
    prepare(IORING_OP_RECV, 0, b, sizeof b, 1)->flags = IOSQE_FIXED_FILE;
    submit();
    said("recv of a registered one", result(&data), b);
    close(s);
    /* An instance filled on the ring. */
    pair(&c2, &s2);
    int ep = epoll_create1(0);
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 42};
    e = prepare(IORING_OP_EPOLL_CTL, ep, &ev, EPOLL_CTL_ADD, 1);
    e->off = s2;
    submit();
    said("epoll_ctl", result(&data), 0);
    said("epoll_wait", epoll_wait(ep, &ev, 1, 0), "");
    send(c2, "y", 1, 0);
    said("epoll_wait", epoll_wait(ep, &ev, 1, 5000), 0);
    printf("data %d\n", (int)ev.data.u64);
    close(s2);
    close(c2);
    /* A worker waits for the listener before the ring does, and another one after. */
    c = connect_by_libc();
    send(c, "early", 5, 0);
    s = run(IORING_OP_ACCEPT, listener, 0, 0);
    said("accept on the ring", s, 0);
    said("recv", recv(s, b, sizeof b, 0), b);
    send(s, "welcome", 7, 0);
    said("recv", recv(c, b, sizeof b, 0), b);
    close(s);
    close(c);
    prepare(IORING_OP_ACCEPT, listener, 0, 0, 1);
    submit();
    c = connect_by_libc();
    s = result(&data);
    said("accept that waited", s, 0);
    send(c, "ping", 4, 0);
    said("recv", run(IORING_OP_RECV, s, b, sizeof b), b);
    close(s);
    close(c);
    /* connect on the ring. */
    c = socket(AF_INET, SOCK_STREAM, 0);
    e = prepare(IORING_OP_CONNECT, c, &address, 0, 1);
    e->off = sizeof address;
    submit();
    said("connect on the ring", result(&data), 0);
    s = accept(listener, 0, 0);
    said("accept", s, 0);
    send(c, "hello", 5, 0);
    said("recv", recv(s, b, sizeof b, 0), b);
    said("close of the listener", run(IORING_OP_CLOSE, listener, 0, 0), 0);
    teardown();
    /* What the polling thread closes is let go of a moment later. */
#ifdef POLLED
    int tries = 200;
#else
    int tries = 1;
#endif
    int refused = 0;
    while (!refused && tries-- > 0) {
        c = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(c, (struct sockaddr *)&address, sizeof address) < 0)
            refused = -errno;
        close(c);
        if (!refused)
            usleep(5000);
    }
    said("nobody listens", refused, 0);
    printf("ok\n");
    return 0;
}

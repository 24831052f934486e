/* Lengths at all edges: every power of two and its neighbours, below zero, sums of vectors that overflow. Buffers end
 * with memory, or are at the end of the program's half or in the kernel's. Sockets are in every state. A transcript,
 * the same on stock sockets and on ours, of what each call returns and of what reaches the peer.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define G (1ul << 30)
typedef unsigned long W;
static int c = -1, p = -1, l, f; /* connection, its peer, listener, file */
static char *big, *edge, sink[1 << 20];
static struct sockaddr_in a = {AF_INET};
static struct iovec v[1100];

enum { FINE, SHUT_OWN, SHUT_BOTH, ENDED, CLOSED, RESET, NEW, LISTENS, STATES };
static const char *STATE[] = {"fine", "shut", "shut both", "peer shut", "peer closed", "reset", "new", "listens"};

static void begin(int state) {
    socklen_t n = sizeof a;
    if (c >= 0) close(c);
    if (p >= 0) close(p);
    p = -1;
    if (state == LISTENS) { c = dup(l); return; }
    c = socket(AF_INET, SOCK_STREAM, 0);
    fcntl(c, F_SETFL, O_NONBLOCK);
    if (state == NEW) return;
    fcntl(c, F_SETFL, 0);
    if (connect(c, (void *)&a, n)) abort();
    p = accept(l, 0, 0);
    fcntl(c, F_SETFL, O_NONBLOCK);
    fcntl(p, F_SETFL, O_NONBLOCK);
    struct linger hard = {1, 0};
    if (state == SHUT_OWN) shutdown(c, SHUT_WR);
    if (state == SHUT_BOTH) shutdown(c, SHUT_RDWR);
    if (state == ENDED) shutdown(p, SHUT_WR);
    if (state == RESET) setsockopt(p, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    if (state == CLOSED || state == RESET) close(p), p = -1;
    if (state > SHUT_OWN && state < NEW) usleep(300);
}

/* Reads at least `least` bytes. */
static long drain(long least) {
    long n, all = 0;
    struct pollfd x = {p, POLLIN};
    while (p >= 0 && (all < least ? poll(&x, 1, 10000) > 0 : 1) && (n = recv(p, sink, sizeof sink, MSG_DONTWAIT)) > 0)
        all += n;
    return all;
}

static struct msghdr m;
static struct msghdr *msg(void *b, W n) {
    v[0] = (struct iovec){b, n};
    m = (struct msghdr){.msg_iov = v, .msg_iovlen = 1};
    return &m;
}
static struct mmsghdr mm[2];
static struct mmsghdr *two(void *b, W n) {
    mm[0].msg_hdr = *msg(b, n);
    v[1] = (struct iovec){big, 1};
    mm[1].msg_hdr = (struct msghdr){.msg_iov = v + 1, .msg_iovlen = 1};
    return mm;
}
static struct iovec *vec(void *b, W n) { return msg(b, n)->msg_iov; }
static struct iovec *behind(void *b, W n) { v[0] = (struct iovec){big, 1}; v[1] = (struct iovec){b, n}; return v; }
static off_t zero;

#define SENDS \
    X(write, write(c, b, n)) X(send, send(c, b, n, MSG_NOSIGNAL)) X(send_plain, send(c, b, n, 0)) \
    X(sendto, sendto(c, b, n, 0, 0, 0)) X(sendto_long, sendto(c, b, n, 0, (void *)&a, 1000)) \
    X(writev, writev(c, vec(b, n), 1)) X(writev_2, writev(c, behind(b, n), 2)) \
    X(pwritev2, pwritev2(c, vec(b, n), 1, -1, 0)) X(pwritev2_flags, pwritev2(c, vec(b, n), 1, -1, 1 << 20)) \
    X(sendmsg, sendmsg(c, msg(b, n), 0)) X(sendmmsg, sendmmsg(c, two(b, n), 2, 0)) \
    X(pwrite, pwrite(c, b, n, 0)) X(sys_write, syscall(SYS_write, c, b, n)) X(sys_sendto, syscall(SYS_sendto, c, b, n, 0, 0, 0))
#define RECEIVES \
    X(read, read(c, b, n)) X(recv, recv(c, b, n, 0)) X(recv_peek, recv(c, b, n, MSG_PEEK)) \
    X(recv_trunc, recv(c, b, n, MSG_TRUNC)) X(recvfrom, recvfrom(c, b, n, 0, 0, 0)) \
    X(readv, readv(c, vec(b, n), 1)) X(readv_2, readv(c, behind(b, n), 2)) \
    X(preadv2, preadv2(c, vec(b, n), 1, -1, 0)) X(preadv2_flags, preadv2(c, vec(b, n), 1, -1, 1 << 20)) \
    X(recvmsg, recvmsg(c, msg(b, n), 0)) X(recvmsg_peek, recvmsg(c, msg(b, n), MSG_PEEK)) \
    X(recvmmsg, recvmmsg(c, two(b, n), 2, 0, 0)) X(pread, pread(c, b, n, 0)) X(sys_read, syscall(SYS_read, c, b, n))

typedef struct { const char *name; int receives; long (*call)(char *b, W n); } Call;
#define X(name, e) static long do_##name(char *b, W n) { return e; }
SENDS RECEIVES
#undef X
static Call calls[] = {
#define X(name, e) {#name, 0, do_##name},
    SENDS
#undef X
#define X(name, e) {#name, 1, do_##name},
    RECEIVES
#undef X
};
#define CALLS (sizeof calls / sizeof *calls)

/* How much fits is not compared, nor how much of it comes in one piece. */
static void say(long r, int e, W n) {
    if (r < 0) printf(" %s", strerrorname_np(e));
    else if (r > (1 << 16) || n > 1 << 16) printf(" %s", r ? "some" : "0");
    else printf(" %ld", r);
}
static void try(Call *x, char *b, W n) {
    if (x->receives && p >= 0) send(p, "xyz", 3, MSG_NOSIGNAL);
    errno = 0;
    long r = x->call(b, n);
    int e = errno;
    if (x->receives) say(r, e, 1);
    else say(r, e, n);
    if (x->receives) printf("/%d", (int)recv(c, sink, 99, MSG_DONTWAIT));
    else {
        long sent = x->call != do_sendmmsg ? r : r > 0 ? mm[0].msg_len + (r > 1 ? mm[1].msg_len : 0) : 0;
        long got = drain(sent);
        if (got != (sent < 0 || p < 0 ? 0 : sent)) printf("(%ld ARRIVED)", got);
    }
}

static void lengths(void) {
    for (Call *x = calls; x < calls + CALLS; x++) {
        printf("%s:", x->name);
        begin(FINE);
        for (int k = 0; k < 64; k++)
            /* As much as fits, each time: of those only a few. */
            for (int d = -1; d <= 1; d++)
                if (x->receives || k < 20 || k > 45 || k == 31 || k == 32 || d == 0 && k % 4 == 0) try(x, big, (1ul << k) + d);
        long more[] = {-2, -9, -4096, -65536, 0x7ffff000, 0x7ffff001, 0x7fffefff};
        for (int i = 0; i < 7; i++) try(x, big, more[i]);
        puts("");
    }
}

static void places(void) {
    char *b[] = {0, (char *)(1ul << 44), (char *)0x7fffffffe000, (char *)0x7fffffffefff, (char *)0x7ffffffff000,
                 (char *)(1ul << 47), (char *)(1ul << 63), (char *)0xffff888000000000, (char *)-1ul, edge, big};
    W n[] = {0, 1, 8, 100, 4096, 5000, 1ul << 31, 1ul << 47, -1ul};
    for (int state = 0; state < STATES; state++)
        for (Call *x = calls; x < calls + CALLS; x++) {
            printf("%s, %s:", STATE[state], x->name);
            for (int i = 0; i < 11; i++) {
                printf(" |");
                for (int k = 0; k < 9; k++) {
                    /* How much lies before the end of memory is sent in pieces, as the kernel has room. */
                    if (b[i] == edge && !x->receives && n[k] > 8) continue;
                    /* Here the first vector is filled (docs/limits.md). */
                    if (x->call == do_readv_2 && i < 10 && n[k] && n[k] < 1ul << 47) continue;
                    begin(state);
                    try(x, b[i], n[k]);
                }
            }
            puts("");
        }
}

static void row(const char *name, int n, int count) {
    begin(FINE);
    printf("%s:", name);
    errno = 0; long r = writev(c, v, count); say(r, errno, 1 << 20); drain(r);
    errno = 0; r = pwritev2(c, v, count, -1, 0); say(r, errno, 1 << 20); drain(r);
    struct msghdr h = {.msg_iov = v, .msg_iovlen = count < 0 ? (W)count : count};
    errno = 0; r = sendmsg(c, &h, 0); say(r, errno, 1 << 20); drain(r);
    send(p, "xyz", 3, 0);
    errno = 0; r = readv(c, v, count); say(r, errno, 1);
    errno = 0; r = recvmsg(c, &h, 0); say(r, errno, 1);
    send(p, "xyz", 3, 0);
    errno = 0; r = recvmsg(c, &h, MSG_PEEK); say(r, errno, 1);
    printf(" %d\n", (int)recv(c, sink, 99, 0));
}
#define V(i, b, n) v[i] = (struct iovec){(void *)(b), n}
static void vectors(void) {
    V(0, big, -1ul); row("below zero", 1, 1); V(1, big, 3); row("below zero, 3", 2, 2);
    V(0, big, 3); V(1, big, -1ul); row("3, below zero", 2, 2); V(0, -1ul, 3); row("kernel, below zero", 2, 2);
    V(0, big, 1ul << 62); V(1, big, 1ul << 62); row("overflow", 2, 2); row("one that is too long", 1, 1);
    V(0, big, G); V(1, big + G, G); V(2, big + 2 * G, G); row("3 GiB", 3, 3);
    V(0, big, 0x7fffefff); V(1, big, 1); V(2, big, 1); V(3, big, 0); row("the limit", 4, 4);
    V(0, -4096ul, 0); V(1, big, 3); row("kernel, empty", 2, 2); V(0, big, 3); V(1, -1ul, 0); row("kernel, empty, behind", 2, 2);
    V(0, big, 0); V(1, big, 0); row("empty", 2, 2); row("none", 0, 0);
    for (int i = 0; i < 1100; i++) V(i, big + i, 1);
    row("1024", 1024, 1024); row("1025", 1025, 1025); row("negative", -1, -1);
    V(1023, big, -1ul); row("1024, the last below zero", 1024, 1024);
    struct msghdr h = {.msg_iov = v, .msg_iovlen = 1, .msg_name = &a, .msg_namelen = -1};
    W controls[] = {8, 1ul << 31, 1ul << 40, -1ul};
    for (int i = 0; i < 5; i++) {
        begin(FINE);
        V(0, big, 3);
        send(p, "xyz", 3, 0);
        long r = sendmsg(c, &h, 0);
        printf("header %d: %ld %s", i, r, r < 0 ? strerrorname_np(errno) : "");
        r = i ? 0 : recvmsg(c, &h, 0);
        printf(" %ld %s\n", r, r < 0 ? strerrorname_np(errno) : "");
        h.msg_namelen = 0, h.msg_name = 0, h.msg_control = sink, h.msg_controllen = controls[i & 3];
    }
}

static void files(void) {
    for (int own = 0; own < 2; own++)
        for (int state = FINE; state <= SHUT_OWN; state++) {
            printf("sendfile %s:", STATE[state]);
            W n[] = {0, 1, 1ul << 16, 1ul << 31, 3 * G, 1ul << 62, (1ul << 63) - 1, (1ul << 63) - 5, 1ul << 63, -1ul};
            for (int i = 0; i < 10; i++) {
                off_t at = i & 1 ? 5 : 0;
                begin(state);
                lseek(f, 0, SEEK_SET);
                errno = 0;
                long r = sendfile(c, f, own ? 0 : &at, n[i]);
                say(r, errno, n[i]);
                drain(r);
                errno = 0;
                r = sendfile(c, -1, own ? 0 : &at, n[i]);
                say(r, errno, 1);
                errno = 0;
                r = sendfile(c, 1, own ? 0 : &at, n[i]);
            }
            puts("");
        }
}

static long receive_all(void) {
    long n, all = 0;
    while ((n = read(p, sink, sizeof sink)) > 0) all += n;
    return all;
}
#include <pthread.h>
static void *other(void *x) { return (void *)receive_all(); }
/* Blocking calls end at the limit. (The pages are one page of zeros.) */
static void huge(void) {
    begin(FINE);
    fcntl(c, F_SETFL, 0);
    fcntl(p, F_SETFL, 0);
    pthread_t t;
    pthread_create(&t, 0, other, 0);
    V(0, big, G); V(1, big + G, G); V(2, big + 2 * G, G);
    printf("send %zd", send(c, big, 3 * G, 0));
    printf(" writev %zd\n", writev(c, v, 3));
    printf(" sendfile %zd\n", sendfile(c, f, &zero, 3 * G));
    shutdown(c, SHUT_WR);
    void *all;
    pthread_join(t, &all);
    printf("received %ld\n", (long)all);
}

int main(void) {
    socklen_t n = sizeof a;
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, 0, _IOFBF, 1 << 20);
    l = socket(AF_INET, SOCK_STREAM, 0);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(l, (void *)&a, n) || listen(l, 64) || getsockname(l, (void *)&a, &n)) abort();
    int shape = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    /* Far below the end of the program's half. */
    big = mmap((void *)(1ul << 45), 3 * G, PROT_READ | PROT_WRITE, shape, -1, 0);
    char *two_pages = mmap((void *)(1ul << 43), 8192, PROT_READ | PROT_WRITE, shape, -1, 0);
    mprotect(two_pages + 4096, 4096, PROT_NONE);
    edge = two_pages + 4096 - 6;
    f = memfd_create("file", 0);
    if (ftruncate(f, 3 * G)) abort();
    lengths(), places(), vectors(), files(), huge();
    puts("ok");
    return 0;
}

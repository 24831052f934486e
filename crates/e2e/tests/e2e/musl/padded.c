/* Messages with any padding. In musl the lengths of a message have 32 bits, and the program owns the bytes behind them.
 * Prints "ok" if bytes and descriptors arrive as they are sent. */
#include "talk.h"

#include <sys/un.h>

enum { SIZE = 300, PARTS = 3 };

/* Every byte of a header that is not set below is 0xff. (In glibc there is none.) */
static struct msghdr header(struct iovec *iov, size_t n) {
    struct msghdr m;
    memset(&m, 0xff, sizeof m);
    m.msg_name = NULL;
    m.msg_namelen = 0;
    m.msg_iov = iov;
    m.msg_iovlen = n;
    m.msg_control = NULL;
    m.msg_controllen = 0;
    m.msg_flags = 0;
    return m;
}

static void in_parts(int from, int to) {
    char out[SIZE], in[SIZE];
    struct iovec o[PARTS], i[PARTS];
    for (int p = 0; p < PARTS; p++) {
        o[p] = (struct iovec){out + p * SIZE / PARTS, SIZE / PARTS};
        i[p] = (struct iovec){in + p * SIZE / PARTS, SIZE / PARTS};
    }
    struct msghdr sent = header(o, PARTS), got = header(i, PARTS);
    for (int turn = 0; turn < 50; turn++) {
        memset(out, turn, SIZE);
        memset(in, 0, SIZE);
        MUST(sendmsg(from, &sent, 0) == SIZE);
        MUST(recvmsg(to, &got, MSG_WAITALL) == SIZE);
        MUST(memcmp(in, out, SIZE) == 0 && got.msg_controllen == 0 && got.msg_flags == 0);
    }
}

static void several(int from, int to) {
    char out[PARTS][SIZE], in[PARTS][SIZE];
    struct iovec o[PARTS], i[PARTS];
    struct mmsghdr sent[PARTS], got[PARTS];
    for (int p = 0; p < PARTS; p++) {
        memset(out[p], 'a' + p, SIZE);
        o[p] = (struct iovec){out[p], SIZE};
        i[p] = (struct iovec){in[p], SIZE};
        sent[p].msg_hdr = header(&o[p], 1);
        got[p].msg_hdr = header(&i[p], 1);
    }
    MUST(sendmmsg(from, sent, PARTS, 0) == PARTS);
    for (int p = 0; p < PARTS; p++)
        MUST(sent[p].msg_len == SIZE);
    MUST(recvmmsg(to, got, PARTS, MSG_WAITALL, NULL) == PARTS);
    for (int p = 0; p < PARTS; p++)
        MUST(got[p].msg_len == SIZE && memcmp(in[p], out[p], SIZE) == 0);
}

/* Room for one descriptor. */
union control {
    struct cmsghdr h;
    char room[CMSG_SPACE(sizeof(int))];
};

/* The number of `fd` after it was sent to this process. */
static int passed(int fd) {
    int u[2], got = -1;
    char byte = 'x';
    struct iovec iov = {&byte, 1};
    struct msghdr m = header(&iov, 1);
    union control c;
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, u) == 0);
    memset(&c, 0xff, sizeof c);
    m.msg_control = &c;
    m.msg_controllen = sizeof c;
    c.h.cmsg_level = SOL_SOCKET;
    c.h.cmsg_type = SCM_RIGHTS;
    c.h.cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(&c.h), &fd, sizeof fd);
    MUST(sendmsg(u[0], &m, 0) == 1);
    memset(&c, 0xff, sizeof c);
    m = header(&iov, 1);
    m.msg_control = &c;
    m.msg_controllen = sizeof c;
    MUST(recvmsg(u[1], &m, 0) == 1);
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    MUST(h && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(sizeof got));
    memcpy(&got, CMSG_DATA(h), sizeof got);
    MUST(got >= 0 && close(u[0]) == 0 && close(u[1]) == 0);
    return got;
}

int main(void) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    int listener = hear(0);
    MUST(getsockname(listener, (struct sockaddr *)&a, &n) == 0);
    int c = dial(ntohs(a.sin_port)), s = accept(listener, NULL, NULL);
    MUST(s >= 0);
    in_parts(c, s);
    several(s, c);
    int other = passed(s);
    MUST(close(s) == 0);
    in_parts(other, c);
    in_parts(c, other);
    MUST(close(other) == 0 && recv(c, &n, 1, 0) == 0 && close(c) == 0);
    puts("ok");
    return 0;
}

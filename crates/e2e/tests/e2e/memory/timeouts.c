/* Each wait of a connection and of a listener ends after a fifth of a second, whoever says what time it is; then
 * 100,000 bytes pass. Prints what each has returned. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static void say(const char *what, long r) { printf("%s: %ld %s\n", what, r, r < 0 ? strerror(errno) : ""); }

int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(l, (void *)&a, length) || getsockname(l, (void *)&a, &length) || listen(l, 8)) return 1;
    if (connect(c, (void *)&a, length)) return 2;
    int s = accept(l, 0, 0), e = epoll_create1(0);
    char small[8];
    static char many[100000], back[100000];
    if (write(c, "a", 1) != 1 || read(s, small, 1) != 1) return 3;
    struct timeval fifth = {0, 200000};
    struct timespec also = {0, 200000000};
    for (int fd = s;; fd = l) {
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &fifth, sizeof fifth);
        if (fd == s) say("read", read(s, small, 1));
        else say("accept", accept(l, 0, 0));
        if (fd == l) break;
    }
    for (int n = 1; n <= 2; n++) {
        struct pollfd p[2] = {{s, POLLIN, 0}, {l, POLLIN, 0}};
        say("poll", poll(p, n, 200));
        say("ppoll", ppoll(p, n, &also, 0));
        fd_set f;
        FD_ZERO(&f);
        FD_SET(s, &f);
        if (n == 2) FD_SET(l, &f);
        struct timeval left = fifth;
        say("select", select((s > l ? s : l) + 1, &f, 0, 0, &left));
        struct epoll_event v = {.events = EPOLLIN};
        epoll_ctl(e, EPOLL_CTL_ADD, n == 1 ? s : l, &v);
        say("epoll", epoll_wait(e, &v, 1, 200));
    }
    setsockopt(c, SOL_SOCKET, SO_SNDTIMEO, &fifth, sizeof fifth);
    for (size_t i = 0; i < sizeof many; i++) many[i] = i * 7;
    size_t got = 0, sent = 0;
    while (got < sizeof many) {
        if (sent < sizeof many) sent += write(c, many + sent, sizeof many - sent > 3000 ? 3000 : sizeof many - sent);
        got += read(s, back + got, sizeof back - got);
    }
    say("bytes", memcmp(many, back, sizeof many) ? -1 : (long)got);
    while (write(c, many, sizeof many) > 0) {}
    say("write", -1);
    return 0;
}

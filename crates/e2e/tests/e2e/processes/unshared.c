/* A thread that gets descriptors of its own, and closes them; another thread's connections and listener go on.
 *
 * usage: unshared unshare|close_range|number|cloexec */
#include "talk.h"
#include <fcntl.h>
#include <linux/close_range.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/syscall.h>

static const char *how;

static void *own(void *arg) {
    (void)arg;
    if (!strcmp(how, "unshare")) {
        MUST(unshare(CLONE_FILES) == 0);
    } else if (!strcmp(how, "number")) {
        MUST(syscall(SYS_unshare, CLONE_FILES) == 0);
    } else if (!strcmp(how, "cloexec")) {
        MUST(close_range(3, ~0u, CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC) == 0);
    } else {
        MUST(close_range(3, ~0u, CLOSE_RANGE_UNSHARE) == 0);
    }
    for (int fd = 3; fd < 64; fd++)
        close(fd);
    return NULL;
}

static void ping(int a, int b) {
    char buf[4];
    MUST(send(a, "ping", 4, 0) == 4 && recv(b, buf, 4, MSG_WAITALL) == 4);
    MUST(send(b, "pong", 4, 0) == 4 && recv(a, buf, 4, MSG_WAITALL) == 4);
}

int main(int argc, char **argv) {
    MUST(argc == 2);
    how = argv[1];
    struct sockaddr_in a = loopback(0);
    socklen_t n = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(bind(l, (void *)&a, n) == 0 && listen(l, 8) == 0 && getsockname(l, (void *)&a, &n) == 0);
    int c = dial(ntohs(a.sin_port)), s = accept(l, NULL, NULL), ep = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = s};
    MUST(s >= 0 && ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, s, &e) == 0);
    e.data.fd = l;
    MUST(epoll_ctl(ep, EPOLL_CTL_ADD, l, &e) == 0);
    ping(c, s);
    MUST(send(c, "left", 4, 0) == 4);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, own, NULL) == 0 && pthread_join(thread, NULL) == 0);
    MUST(epoll_wait(ep, &e, 1, 10000) == 1 && e.data.fd == s);
    char buf[4];
    MUST(recv(s, buf, 4, MSG_WAITALL) == 4 && !memcmp(buf, "left", 4));
    ping(c, s);
    int c2 = dial(ntohs(a.sin_port));
    MUST(epoll_wait(ep, &e, 1, 10000) == 1 && e.data.fd == l);
    int s2 = accept(l, NULL, NULL);
    MUST(s2 >= 0);
    ping(c2, s2);
    MUST(close(c) == 0 && recv(s, buf, 1, 0) == 0 && close(s) == 0 && close(l) == 0 && close(ep) == 0);
    puts("ok");
    return 0;
}

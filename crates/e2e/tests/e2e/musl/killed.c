/* Shows how each way of waiting ends when the process at the other end is killed.
 *
 *     killed listen|dial PORT wait|hold
 *
 * One side waits, in threads, each on a connection of its own, and prints what it saw when all have ended. The other side
 * holds the connections until it is killed; it has said "holds" before.
 */
#include "talk.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/select.h>

enum { WAYS = 5 };
static const char *const ways[WAYS] = {"recv", "read", "poll", "select", "epoll"};

struct one {
    int fd, way;
    char saw[40];
};

static void *wait_on(void *argument) {
    struct one *one = argument;
    int fd = one->fd, ready = 1;
    char c;
    if (one->way == 2) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        ready = poll(&p, 1, 60000);
    } else if (one->way == 3) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        struct timeval limit = {.tv_sec = 60};
        ready = select(fd + 1, &set, NULL, NULL, &limit);
    } else if (one->way == 4) {
        int epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN};
        MUST(epoll >= 0 && epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
        ready = epoll_wait(epoll, &event, 1, 60000);
        MUST(close(epoll) == 0);
    }
    ssize_t n = one->way == 1 ? read(fd, &c, 1) : recv(fd, &c, 1, 0);
    snprintf(one->saw, sizeof one->saw, "%s: ready %d, %zd", ways[one->way], ready, n);
    MUST(close(fd) == 0);
    return NULL;
}

int main(int argc, char **argv) {
    MUST(argc == 4);
    int port = atoi(argv[2]), listens = strcmp(argv[1], "listen") == 0;
    struct one all[WAYS];
    pthread_t threads[WAYS];
    int listener = listens ? hear(port) : -1;
    for (int i = 0; i < WAYS; i++) {
        all[i].way = i;
        all[i].fd = listens ? accept(listener, NULL, NULL) : dial(port);
        MUST(all[i].fd >= 0);
        /* Both ends have talked before: the connection is where it stays. */
        char c = 'x';
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == listens)
                MUST(recv(all[i].fd, &c, 1, 0) == 1);
            else
                put(all[i].fd, &c, 1);
        }
    }
    if (strcmp(argv[3], "hold") == 0) {
        puts("holds");
        MUST(fflush(stdout) == 0);
        for (;;)
            pause();
    }
    for (int i = 0; i < WAYS; i++)
        MUST(pthread_create(&threads[i], NULL, wait_on, &all[i]) == 0);
    puts("waits");
    MUST(fflush(stdout) == 0);
    for (int i = 0; i < WAYS; i++)
        MUST(pthread_join(threads[i], NULL) == 0);
    for (int i = 0; i < WAYS; i++)
        puts(all[i].saw);
    puts("ok");
    return 0;
}

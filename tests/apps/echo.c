/* A server and a client with threads and a busy heap, for tests under allocators, sanitizers and valgrind.
 *
 *     echo serve PORT CONNECTIONS             serves that many connections, then prints "ok"
 *     echo ask PORT CONNECTIONS MESSAGES      opens that many connections at once, then prints "ok"
 *     echo both PORT CONNECTIONS MESSAGES     does both in one process, three times, then prints "ok"
 *
 * The main thread serves every other connection by epoll. Each of the rest has a thread. */
#define _GNU_SOURCE
#include "talk.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/epoll.h>

static int port, connections, messages;

static void *serve_one(void *arg) {
    int fd = (int)(intptr_t)arg;
    while (echo_some(fd))
        ;
    MUST(close(fd) == 0);
    return NULL;
}

static void watch(int ep, int fd) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    MUST(epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e) == 0);
}

static void serve(int listener) {
    int ep = epoll_create1(EPOLL_CLOEXEC), accepted = 0, ended = 0, threads = 0;
    pthread_t *thread = calloc((size_t)connections, sizeof *thread);
    MUST(ep >= 0 && thread);
    MUST(fcntl(listener, F_SETFL, O_NONBLOCK) == 0);
    watch(ep, listener);
    while (ended + threads < connections) {
        struct epoll_event events[16];
        int n = epoll_wait(ep, events, 16, 60000);
        MUST(n > 0);
        for (int i = 0; i < n; i++) {
            int fd = events[i].data.fd;
            if (fd != listener) {
                if (!echo_some(fd)) {
                    MUST(close(fd) == 0);
                    ended++;
                }
                continue;
            }
            while ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
                limited(fd);
                if (accepted++ % 2 == 0)
                    watch(ep, fd);
                else
                    MUST(pthread_create(&thread[threads++], NULL, serve_one, (void *)(intptr_t)fd) == 0);
            }
            MUST(errno == EAGAIN);
        }
    }
    for (int i = 0; i < threads; i++)
        MUST(pthread_join(thread[i], NULL) == 0);
    free(thread);
    MUST(close(ep) == 0);
}

static void *ask_one(void *arg) {
    int fd = dial(port);
    talk(fd, messages, (unsigned)(uintptr_t)arg);
    part(fd);
    return NULL;
}

static void ask(void) {
    pthread_t *thread = calloc((size_t)connections, sizeof *thread);
    MUST(thread);
    for (int i = 0; i < connections; i++)
        MUST(pthread_create(&thread[i], NULL, ask_one, (void *)(intptr_t)i) == 0);
    for (int i = 0; i < connections; i++)
        MUST(pthread_join(thread[i], NULL) == 0);
    free(thread);
}

static void *serve_thread(void *arg) {
    serve((int)(intptr_t)arg);
    return NULL;
}

/* The threads of later rounds run on memory that earlier threads have used. */
static void both(void) {
    int listener = hear(port);
    for (int round = 0; round < 3; round++) {
        pthread_t server;
        MUST(pthread_create(&server, NULL, serve_thread, (void *)(intptr_t)listener) == 0);
        ask();
        MUST(pthread_join(server, NULL) == 0);
    }
    MUST(close(listener) == 0);
}

int main(int argc, char **argv) {
    MUST(argc >= 4);
    port = atoi(argv[2]);
    connections = atoi(argv[3]);
    messages = argc > 4 ? atoi(argv[4]) : 0;
    if (strcmp(argv[1], "serve") == 0) {
        int listener = hear(port);
        serve(listener);
        MUST(close(listener) == 0);
    } else if (strcmp(argv[1], "both") == 0)
        both();
    else
        ask();
    puts("ok");
    return 0;
}

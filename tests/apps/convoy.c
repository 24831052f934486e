#define _GNU_SOURCE
/* Many threads of one process open and close connections in loops. convoy HOW THREADS TURNS
 *
 *    own     in each turn: listen on a new port, connect to it, accept, send three bytes, close
 *    kept    the same, but each thread keeps one listener for all turns
 *    one     all threads connect to one listener; four threads accept, answer, and close
 *    epoll   as "one", but those four threads wait in epoll_wait for the listener and the connections
 *    alike   all threads connect to one listener and accept from it, whichever connection they get
 *
 *    Prints the longest call of each kind and the total time in microseconds on standard error, and "ok" if every
 *    byte has arrived. */
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { BIND, LISTEN, CONNECT, ACCEPT, SEND, RECV, CLOSE, KINDS };
static const char *const names[KINDS] = {"bind", "listen", "connect", "accept", "send", "recv", "close"};
static long longest[KINDS];
static int turns, threads, failed, shared = -1, shared_epoll = -1;
static struct sockaddr_in shared_at;
static const char *how;
static pthread_barrier_t all_there;
/* When the first thread began, and when the last one ended, in microseconds. */
static long begun, ended;

static long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000L + t.tv_nsec / 1000;
}

static int timed(int kind, long since, int result) {
    long took = now_us() - since, seen = __atomic_load_n(&longest[kind], __ATOMIC_RELAXED);
    while (took > seen &&
           !__atomic_compare_exchange_n(&longest[kind], &seen, took, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    if (result < 0) {
        perror(names[kind]);
        __atomic_store_n(&failed, 1, __ATOMIC_RELAXED);
    }
    return result;
}
#define TIMED(kind, call) (since = now_us(), timed(kind, since, (int)(call)))

static int listener(struct sockaddr_in *a, int backlog) {
    long since;
    socklen_t len = sizeof *a;
    int l = socket(AF_INET, SOCK_STREAM, 0);
    *a = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    TIMED(BIND, bind(l, (struct sockaddr *)a, sizeof *a));
    TIMED(LISTEN, listen(l, backlog));
    getsockname(l, (struct sockaddr *)a, &len);
    return l;
}

static int opened(const struct sockaddr_in *a) {
    long since;
    int c = socket(AF_INET, SOCK_STREAM, 0);
    TIMED(CONNECT, connect(c, (const struct sockaddr *)a, sizeof *a));
    return c;
}

static void sends(int fd) {
    long since;
    TIMED(SEND, send(fd, "abc", 3, MSG_NOSIGNAL));
}

static void receives(int fd) {
    long since;
    char got[3] = "";
    TIMED(RECV, recv(fd, got, 3, MSG_WAITALL));
    if (memcmp(got, "abc", 3))
        failed = 1;
}

static void closes(int fd) {
    long since;
    TIMED(CLOSE, close(fd));
}

static void *loop(void *arg) {
    long since;
    struct sockaddr_in a = shared_at;
    int own = !strcmp(how, "own"), served = !strcmp(how, "one") || !strcmp(how, "epoll");
    int l = own || served ? -1 : shared >= 0 ? shared : listener(&a, 5);
    (void)arg;
    pthread_barrier_wait(&all_there);
    long none = 0, seen;
    __atomic_compare_exchange_n(&begun, &none, now_us(), 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    for (int i = 0; i < turns && !failed; i++) {
        if (own)
            l = listener(&a, 5);
        int c = opened(&a);
        if (served) {
            sends(c);
            receives(c);
        } else {
            int s = TIMED(ACCEPT, accept(l, NULL, NULL));
            sends(c);
            receives(s);
            closes(s);
        }
        closes(c);
        if (own)
            closes(l);
    }
    if (!own && !served && l != shared)
        closes(l);
    long now = now_us();
    for (seen = ended; now > seen && !__atomic_compare_exchange_n(&ended, &seen, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);)
        ;
    return NULL;
}

static void *serve(void *arg) {
    (void)arg;
    for (;;) {
        int s = accept(shared, NULL, NULL);
        if (s < 0)
            return NULL;
        receives(s);
        sends(s);
        closes(s);
    }
}

static void *serve_events(void *arg) {
    struct epoll_event e = {.events = EPOLLIN};
    (void)arg;
    for (;;) {
        if (epoll_wait(shared_epoll, &e, 1, -1) != 1)
            continue;
        if (e.data.fd != shared) {
            receives(e.data.fd);
            sends(e.data.fd);
            closes(e.data.fd);
            continue;
        }
        int s = accept4(shared, NULL, NULL, SOCK_NONBLOCK);
        if (s >= 0) {
            e = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.fd = s};
            epoll_ctl(shared_epoll, EPOLL_CTL_ADD, s, &e);
        }
    }
}

static pthread_t start(void *(*what)(void *)) {
    pthread_t t;
    if (pthread_create(&t, NULL, what, NULL)) {
        perror("pthread_create");
        exit(1);
    }
    return t;
}

int main(int argc, char **argv) {
    how = argc > 1 ? argv[1] : "own";
    threads = argc > 2 ? atoi(argv[2]) : 200;
    turns = argc > 3 ? atoi(argv[3]) : 20;
    pthread_t *t = calloc(threads, sizeof *t);
    pthread_barrier_init(&all_there, NULL, threads + 1);
    if (strcmp(how, "own") && strcmp(how, "kept"))
        shared = listener(&shared_at, 4096);
    if (!strcmp(how, "epoll")) {
        struct epoll_event e = {.events = EPOLLIN, .data.fd = shared};
        shared_epoll = epoll_create1(0);
        /* Without EPOLLEXCLUSIVE several threads wake for each connection, but only one gets it. */
        e.events |= EPOLLEXCLUSIVE;
        epoll_ctl(shared_epoll, EPOLL_CTL_ADD, shared, &e);
    }
    for (int i = 0; i < 4; i++)
        if (!strcmp(how, "one"))
            start(serve);
        else if (!strcmp(how, "epoll"))
            start(serve_events);
    for (int i = 0; i < threads; i++)
        t[i] = start(loop);
    pthread_barrier_wait(&all_there);
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    for (int i = 0; i < KINDS; i++)
        fprintf(stderr, "%s %ld ", names[i], longest[i]);
    fprintf(stderr, "all %ld\n", ended - begun);
    puts(failed ? "failed" : "ok");
    return failed;
}

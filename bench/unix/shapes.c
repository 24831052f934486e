/* Requests and answers of one size over Unix stream sockets.
   shapes serve PATH WAY        WAY: blocking (a thread each connection), poll, epoll
   shapes ask PATH WAY SIZE CONNECTIONS MS
   `ask` prints JSON: requests, seconds, and the seconds of CPU time that both programs have used. An answer is the
   request with its first and last byte one more; these two are compared. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 128, LARGEST = 1 << 20, WARM = 100 };

static void fail(const char *what) {
    perror(what);
    exit(1);
}
static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}
static double cpu(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) / 1e6;
}

/* One connection. A message is moved in as many calls as it takes. */
struct conn {
    int fd;
    long size, got, put, count;
    int sends;
    unsigned char *buffer;
};

/* Reads without waiting, unless the socket is blocking. 1: a whole message has been read. 0: not yet. -1: the end. */
static int reads(struct conn *c) {
    while (c->got < c->size) {
        ssize_t k = recv(c->fd, c->buffer + c->got, c->size - c->got, 0);
        if (k < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (k <= 0)
            return -1;
        c->got += k;
    }
    c->got = 0;
    return 1;
}
static int writes(struct conn *c) {
    while (c->put < c->size) {
        ssize_t k = send(c->fd, c->buffer + c->put, c->size - c->put, MSG_NOSIGNAL);
        if (k < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (k <= 0)
            return -1;
        c->put += k;
    }
    c->put = 0;
    return 1;
}

/* The server's turn on a connection: -1 at its end. */
static int serves(struct conn *c) {
    for (;;) {
        int r = c->sends ? writes(c) : reads(c);
        if (r <= 0)
            return r;
        if (c->sends)
            c->sends = 0;
        else {
            c->buffer[0]++, c->buffer[c->size - 1]++;
            c->sends = 1;
        }
    }
}

/* The first message of a connection is the size of its messages. Size 0 asks for the CPU time used so far. */
static struct conn *begins(int fd) {
    long size = 0;
    if (recv(fd, &size, sizeof size, MSG_WAITALL) != sizeof size || size <= 0 || size > LARGEST) {
        double used = cpu();
        if (size == 0 && write(fd, &used, sizeof used) < 0)
            perror("cpu");
        close(fd);
        return 0;
    }
    struct conn *c = calloc(1, sizeof *c);
    c->fd = fd, c->size = size, c->buffer = malloc(LARGEST);
    return c;
}
static void ends(struct conn *c) {
    close(c->fd);
    free(c->buffer);
    free(c);
}
static void *alone(void *p) {
    struct conn *c = begins((int)(intptr_t)p);
    if (c) {
        while (serves(c) >= 0)
            ;
        ends(c);
    }
    return 0;
}
static void nonblocking(int fd) {
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

static void serve(const char *path, const char *way) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strncpy(a.sun_path, path, sizeof a.sun_path - 1);
    int l = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(l, (void *)&a, sizeof a) || listen(l, 128))
        fail("listen");
    if (!strcmp(way, "blocking"))
        for (;;) {
            int fd = accept(l, 0, 0);
            pthread_t t;
            if (fd >= 0 && pthread_create(&t, 0, alone, (void *)(intptr_t)fd))
                fail("thread");
            pthread_detach(t);
        }
    if (!strcmp(way, "poll")) {
        static struct conn *conns[MOST];
        struct pollfd p[MOST + 1];
        for (int n = 0;;) {
            p[0] = (struct pollfd){l, n < MOST ? POLLIN : 0, 0};
            for (int i = 0; i < n; i++)
                p[i + 1] = (struct pollfd){conns[i]->fd, conns[i]->sends ? POLLOUT : POLLIN, 0};
            if (poll(p, n + 1, -1) < 0)
                continue;
            for (int i = n - 1; i >= 0; i--)
                if (p[i + 1].revents && serves(conns[i]) < 0) {
                    ends(conns[i]);
                    conns[i] = conns[--n];
                }
            if (p[0].revents) {
                int fd = accept(l, 0, 0);
                struct conn *c = fd >= 0 ? begins(fd) : 0;
                if (c) {
                    nonblocking(fd);
                    conns[n++] = c;
                }
            }
        }
    }
    int e = epoll_create1(0);
    struct epoll_event ev = {EPOLLIN, {0}}, evs[64];
    epoll_ctl(e, EPOLL_CTL_ADD, l, &ev);
    for (;;) {
        int n = epoll_wait(e, evs, 64, -1);
        for (int i = 0; i < n; i++) {
            struct conn *c = evs[i].data.ptr;
            if (!c) {
                int fd = accept(l, 0, 0);
                if (fd >= 0 && (c = begins(fd))) {
                    nonblocking(fd);
                    ev = (struct epoll_event){EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP, {c}};
                    epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev);
                }
            } else if (serves(c) < 0)
                ends(c);
        }
    }
}

static int opened(const char *path, long size) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strncpy(a.sun_path, path, sizeof a.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0 || connect(fd, (void *)&a, sizeof a) || write(fd, &size, sizeof size) != sizeof size)
        fail("connect");
    return fd;
}
static double server_cpu(const char *path) {
    double used = 0;
    int fd = opened(path, 0);
    if (recv(fd, &used, sizeof used, MSG_WAITALL) != sizeof used)
        fail("cpu");
    close(fd);
    return used;
}

/* The client's turn on a connection: writes the request, reads what has arrived of the answer, and compares it. `until`:
   time in nanoseconds after which no request begins. */
static _Atomic long until;
static void asks(struct conn *c) {
    for (;;) {
        int r = c->sends ? writes(c) : reads(c);
        if (r < 0)
            fail("exchange");
        if (!r)
            return;
        if (!c->sends) {
            unsigned char want = c->count + 1;
            if (c->buffer[0] != want || (c->size > 1 && c->buffer[c->size - 1] != want)) {
                fprintf(stderr, "another answer: %d, not %d\n", c->buffer[0], want);
                exit(1);
            }
            c->count++;
            if (c->count >= WARM && now() >= until) {
                c->sends = 2;
                return;
            }
            c->buffer[0] = c->buffer[c->size - 1] = c->count;
            c->sends = 1;
            /* All connections make their first WARM requests before the clock starts. */
            if (c->count == WARM)
                return;
        } else
            c->sends = 0;
    }
}
static int is_done(const struct conn *c) {
    return c->sends == 2;
}
static int is_warm(const struct conn *c) {
    return c->count >= WARM;
}

static void loop(struct conn *conns, int n, const char *way, int (*done)(const struct conn *)) {
    int is_poll = !strcmp(way, "poll"), e = -1;
    struct pollfd p[MOST];
    struct epoll_event evs[64];
    if (!is_poll) {
        e = epoll_create1(0);
        for (int i = 0; i < n; i++) {
            struct epoll_event ev = {EPOLLIN | EPOLLOUT | EPOLLET, {&conns[i]}};
            epoll_ctl(e, EPOLL_CTL_ADD, conns[i].fd, &ev);
        }
    }
    for (int i = 0; i < n; i++)
        if (!done(&conns[i]))
            asks(&conns[i]);
    for (;;) {
        int left = 0;
        for (int i = 0; i < n; i++)
            if (!done(&conns[i]))
                p[left++] = (struct pollfd){conns[i].fd, conns[i].sends ? POLLOUT : POLLIN, i};
        if (!left)
            break;
        if (is_poll) {
            int which[MOST];
            for (int i = 0; i < left; i++)
                which[i] = p[i].revents;
            if (poll(p, left, -1) < 0)
                fail("poll");
            for (int i = 0; i < left; i++)
                if (p[i].revents)
                    asks(&conns[which[i]]);
        } else {
            int k = epoll_wait(e, evs, 64, -1);
            for (int i = 0; i < k; i++)
                if (!done(evs[i].data.ptr))
                    asks(evs[i].data.ptr);
        }
    }
    if (e >= 0)
        close(e);
}

static pthread_barrier_t begin;
static void *asks_alone(void *p) {
    struct conn *c = p;
    while (!is_warm(c))
        asks(c);
    pthread_barrier_wait(&begin);
    pthread_barrier_wait(&begin);
    while (!is_done(c))
        asks(c);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && !strcmp(argv[1], "serve"))
        serve(argv[2], argv[3]);
    if (argc != 7)
        return 2;
    const char *path = argv[2], *way = argv[3];
    long size = atol(argv[4]), ms = atol(argv[6]);
    int n = atoi(argv[5]), blocking = !strcmp(way, "blocking");
    static struct conn conns[MOST];
    pthread_t threads[MOST];
    until = INT64_MAX;
    pthread_barrier_init(&begin, 0, n + 1);
    for (int i = 0; i < n; i++) {
        conns[i] = (struct conn){.fd = opened(path, size), .size = size, .sends = 1, .buffer = calloc(1, LARGEST)};
        if (!blocking)
            nonblocking(conns[i].fd);
        else if (pthread_create(&threads[i], 0, asks_alone, &conns[i]))
            fail("thread");
    }
    if (blocking)
        pthread_barrier_wait(&begin);
    else
        loop(conns, n, way, is_warm);
    double used = cpu() + server_cpu(path);
    long first = 0, last = 0, began = now();
    for (int i = 0; i < n; i++)
        first += conns[i].count;
    until = began + ms * 1000000;
    if (blocking) {
        pthread_barrier_wait(&begin);
        for (int i = 0; i < n; i++)
            pthread_join(threads[i], 0);
    } else
        loop(conns, n, way, is_done);
    double seconds = (now() - began) / 1e9;
    used = cpu() + server_cpu(path) - used;
    for (int i = 0; i < n; i++)
        last += conns[i].count;
    printf("{\"requests\": %ld, \"seconds\": %.6f, \"cpu\": %.6f}\n", last - first, seconds, used);
}

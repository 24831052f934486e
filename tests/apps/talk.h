/* Shared parts of these programs: a client that sends messages and compares the answers, and a
 * server that echoes. Plain POSIX calls. */
#ifndef TALK_H
#define TALK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define MUST(e)                                                                                    \
    do {                                                                                           \
        if (!(e)) {                                                                                \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #e, strerror(errno));           \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static inline struct sockaddr_in loopback(int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return a;
}

/* Sets time limits, so that no call waits for ever. */
static inline void limited(int fd) {
    struct timeval limit = {.tv_sec = 30};
    MUST(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    MUST(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit) == 0);
}

static inline int dial(int port) {
    struct sockaddr_in a = loopback(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(fd >= 0);
    MUST(connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
    limited(fd);
    return fd;
}

static inline int hear(int port) {
    struct sockaddr_in a = loopback(port);
    int on = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    MUST(fd >= 0);
    MUST(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    MUST(bind(fd, (struct sockaddr *)&a, sizeof a) == 0);
    MUST(listen(fd, 64) == 0);
    return fd;
}

static inline void put(int fd, const char *p, size_t n) {
    while (n > 0) {
        ssize_t done = send(fd, p, n, MSG_NOSIGNAL);
        MUST(done > 0);
        p += done;
        n -= (size_t)done;
    }
}

/* Has the other side gone before it read everything? It does so when another thread has ended the
 * client. */
static inline int is_reset(ssize_t n) {
    return n < 0 && (errno == ECONNRESET || errno == EPIPE);
}

/* Echoes the bytes of one recv, from a buffer on the heap. Returns 0 at the end of the stream. */
static inline int echo_some(int fd) {
    size_t room = 70000;
    char *p = malloc(room);
    MUST(p);
    ssize_t n = recv(fd, p, room, 0);
    MUST(n >= 0 || is_reset(n));
    for (ssize_t sent = 0, done; sent < n; sent += done) {
        done = send(fd, p + sent, (size_t)(n - sent), MSG_NOSIGNAL);
        MUST(done > 0 || is_reset(done));
        if (done < 0) {
            n = 0;
            break;
        }
    }
    free(p);
    return n > 0;
}

/* Sends messages of 1 to 100,000 bytes and compares the echoes. `seed` varies the contents. */
static inline void talk(int fd, int messages, unsigned seed) {
    static const size_t sizes[] = {1, 8, 63, 1000, 4096, 30000, 100000};
    for (int i = 0; i < messages; i++) {
        size_t n = sizes[(unsigned)i % (sizeof sizes / sizeof *sizes)], got = 0;
        char *out = malloc(n), *in = malloc(n);
        MUST(out && in);
        for (size_t j = 0; j < n; j++)
            out[j] = (char)(seed * 131 + (unsigned)i * 31 + j * 7 + (j >> 8));
        put(fd, out, n);
        while (got < n) {
            ssize_t more = recv(fd, in + got, n - got, 0);
            MUST(more > 0);
            got += (size_t)more;
        }
        MUST(memcmp(in, out, n) == 0);
        free(in);
        free(out);
    }
}

/* Shuts down, waits for the end of the other side's stream, and closes. */
static inline void part(int fd) {
    char c;
    MUST(shutdown(fd, SHUT_WR) == 0);
    MUST(recv(fd, &c, 1, 0) == 0);
    MUST(close(fd) == 0);
}

#endif

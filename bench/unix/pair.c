/* Two processes on a Unix stream socket. pair serve PATH | pair rtt|way|connects PATH SIZE COUNT
   Prints nanoseconds: of a round trip, of SIZE bytes one way, of a connection with one round trip. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static char buffer[1 << 20];

static void fail(const char *what) {
    perror(what);
    exit(1);
}
static long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}
static int put(int fd, long n) {
    for (long done = 0; done < n;) {
        long k = write(fd, buffer, n - done);
        if (k <= 0)
            return 0;
        done += k;
    }
    return 1;
}
static int get(int fd, long n) {
    for (long done = 0; done < n;) {
        long k = read(fd, buffer, n - done);
        if (k <= 0)
            return 0;
        done += k;
    }
    return 1;
}
static struct sockaddr_un address(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    strncpy(a.sun_path, path, sizeof a.sun_path - 1);
    return a;
}

/* The first message of a connection: size and number of the messages that follow, and whether each is answered whole.
   Otherwise only the last one is answered, with one byte. */
struct order { long size, count, whole; };

static void serve(const char *path) {
    struct sockaddr_un a = address(path);
    int l = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(l, (void *)&a, sizeof a) || listen(l, 64))
        fail("listen");
    for (;;) {
        int s = accept(l, 0, 0);
        struct order o;
        if (s < 0 || read(s, &o, sizeof o) != sizeof o)
            continue;
        for (long i = 0; i < o.count; i++)
            if (!get(s, o.size) || (o.whole && !put(s, o.size)))
                break;
        if (!o.whole)
            put(s, 1);
        close(s);
    }
}

static int opened(const char *path, long size, long count, long whole) {
    struct sockaddr_un a = address(path);
    struct order o = {size, count, whole};
    int c = socket(AF_UNIX, SOCK_STREAM, 0);
    if (c < 0 || connect(c, (void *)&a, sizeof a) || write(c, &o, sizeof o) != sizeof o)
        fail("connect");
    return c;
}

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "serve"))
        serve(argv[2]);
    if (argc != 5)
        return 2;
    const char *path = argv[2];
    long size = atol(argv[3]), count = atol(argv[4]), warm = 100, began;
    if (!strcmp(argv[1], "connects")) {
        began = now();
        for (long i = 0; i < count; i++) {
            int c = opened(path, size, 1, 1);
            if (!put(c, size) || !get(c, size))
                fail("exchange");
            close(c);
        }
    } else {
        int rtt = !strcmp(argv[1], "rtt");
        /* A connection moves to shared memory after some requests, which are not timed. */
        int c = opened(path, size, count + (rtt ? warm : 0), rtt);
        for (long i = 0; rtt && i < warm; i++)
            if (!put(c, size) || !get(c, size))
                fail("warm");
        began = now();
        for (long i = 0; i < count; i++)
            if (!put(c, size) || (rtt && !get(c, size)))
                fail("exchange");
        if (!rtt && !get(c, 1))
            fail("end");
    }
    printf("%.1f\n", (double)(now() - began) / count);
}

// Threads that block in a call while another one puts a file without data in the place of their
// socket (dup2) and then sends them a signal, once: as Java's Socket.close does. Whether the call
// is asleep by then or on its way, it ends.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { ROUNDS = 100 };
static const long long HANGS_NS = 20000000000;

static void check(int good, const char *what) {
    if (!good) {
        printf("%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static void nothing(int signal) { (void)signal; }

static long long now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static const char *what;
static int fd;
static volatile int begun, ended;

static void *block(void *unused) {
    static char much[1 << 20];
    (void)unused;
    ssize_t r;
    fd_set set;
    begun = 1;
    do {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        FD_ZERO(&set);
        FD_SET(fd, &set);
        r = !strcmp(what, "poll")     ? poll(&p, 1, -1)
            : !strcmp(what, "select") ? select(fd + 1, &set, NULL, NULL, NULL)
            : !strcmp(what, "accept") ? accept(fd, NULL, NULL)
            : !strcmp(what, "write") ? write(fd, much, sizeof much)
            : !strcmp(what, "recv")  ? recv(fd, much, sizeof much, 0)
                                     : read(fd, much, sizeof much);
        // Bytes that were written before the buffers were full are no end.
    } while (!strcmp(what, "write") ? r > 0 : r < 0 && errno == EINTR);
    ended = 1;
    return NULL;
}

int main(int argc, char **argv) {
    check(argc == 2, "usage");
    what = argv[1];
    struct sigaction act = {.sa_handler = nothing};
    check(sigaction(SIGUSR1, &act, NULL) == 0 && signal(SIGPIPE, SIG_IGN) != SIG_ERR, "signals");
    // Reads as ended, takes nothing, and is no listener.
    int none[2];
    check(socketpair(AF_UNIX, SOCK_STREAM, 0, none) == 0 && close(none[1]) == 0, "socketpair");
    srandom(1);
    for (int i = 0; i < ROUNDS; i++) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        socklen_t n = sizeof a;
        int l = socket(AF_INET, SOCK_STREAM, 0);
        check(bind(l, (void *)&a, n) == 0 && listen(l, 5) == 0 && getsockname(l, (void *)&a, &n) == 0, "listen");
        int c = socket(AF_INET, SOCK_STREAM, 0);
        check(connect(c, (void *)&a, n) == 0, "connect");
        int s = accept(l, NULL, NULL);
        check(s >= 0, "accept");
        fd = !strcmp(what, "accept") ? l : c;
        begun = ended = 0;
        pthread_t t;
        check(pthread_create(&t, NULL, block, NULL) == 0, "pthread_create");
        while (!begun) {
        }
        long long until = now() + random() % 200000;
        while (now() < until) {
        }
        check(dup2(none[0], fd) == fd && pthread_kill(t, SIGUSR1) == 0, "dup2, kill");
        until = now() + HANGS_NS;
        while (!ended) {
            if (now() > until) {
                printf("round %d hangs\n", i);
                return 1;
            }
            usleep(100);
        }
        check(pthread_join(t, NULL) == 0, "join");
        // The other side sees the end of what was replaced.
        char b[1 << 16];
        if (fd == c) {
            ssize_t got;
            while ((got = read(s, b, sizeof b)) > 0) {
            }
            check(got == 0, "end");
        }
        close(c), close(s), close(l);
    }
    printf("ok\n");
    return 0;
}

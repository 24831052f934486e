/* A thread that sends to itself: what a call takes that needs neither a wake-up nor the kernel, and
 * nothing of what another CPU does. Prints the lower quartile, in nanoseconds, of a write of 8 bytes, a read
 * of 8 bytes, and a write and a read of 100 bytes. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MESSAGES = 2000, ROUNDS = 4000 };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void require(int ok, const char *what) {
    if (!ok) {
        perror(what);
        exit(1);
    }
}

int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0);
    require(bind(l, (void *)&a, len) == 0 && getsockname(l, (void *)&a, &len) == 0 && listen(l, 5) == 0, "listen");
    require(connect(c, (void *)&a, len) == 0, "connect");
    int s = accept(l, 0, 0);
    require(s >= 0, "accept");
    static char bytes[128];
    static double took[3][ROUNDS];
    for (int r = 0; r < ROUNDS; r++) {
        double t = now();
        for (int i = 0; i < MESSAGES; i++)
            require(write(c, bytes, 8) == 8, "write");
        took[0][r] = (now() - t) / MESSAGES;
        t = now();
        for (int i = 0; i < MESSAGES; i++)
            require(read(s, bytes, 8) == 8, "read");
        took[1][r] = (now() - t) / MESSAGES;
        t = now();
        for (int i = 0; i < MESSAGES / 10; i++) {
            require(write(c, bytes, 100) == 100, "write");
            require(read(s, bytes, 100) == 100, "read");
        }
        took[2][r] = (now() - t) / (MESSAGES / 10);
    }
    for (int k = 0; k < 3; k++) {
        qsort(took[k], ROUNDS, sizeof(double), ascending);
        printf("%.3f ", took[k][ROUNDS / 4]);
    }
    puts("");
    return 0;
}

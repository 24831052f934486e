/* locked N: N connections with itself, then `mlockall`: what it returns, and how large the process is (KiB). The
 * connections go on. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int argc, char **argv) {
    static int c[64], s[64];
    int n = argc > 1 ? atoi(argv[1]) : 0;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof a;
    int l = socket(AF_INET, SOCK_STREAM, 0), e = epoll_create1(0);
    if (n < 0 || n > 64 || bind(l, (void *)&a, length) || getsockname(l, (void *)&a, &length) || listen(l, 8)) return 1;
    char b[8] = "";
    for (int i = 0; i < n; i++) {
        c[i] = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(c[i], (void *)&a, length)) return 2;
        s[i] = accept(l, 0, 0);
        struct epoll_event v = {.events = EPOLLIN, .data = {.fd = s[i]}};
        epoll_ctl(e, EPOLL_CTL_ADD, s[i], &v);
        if (write(c[i], "a", 1) != 1 || epoll_wait(e, &v, 1, 10000) != 1 || read(s[i], b, 1) != 1) return 3;
        if (write(c[i], "under way", 9) != 9) return 4;
    }
    printf("mlockall %d", mlockall(MCL_CURRENT));
    for (int i = 0; i < n; i++) {
        if (read(s[i], b, 8) != 8 || memcmp(b, "under wa", 8) || read(s[i], b, 1) != 1) return 5;
        if (write(s[i], "back", 4) != 4 || read(c[i], b, 8) != 4) return 6;
        if (write(c[i], "b", 1) != 1 || read(s[i], b, 8) != 1) return 7;
    }
    char text[4096] = "";
    FILE *f = fopen("/proc/self/status", "r");
    size_t k = fread(text, 1, sizeof text - 1, f);
    text[k] = 0;
    char *size = strstr(text, "VmSize:"), *locked = strstr(text, "VmLck:");
    printf(" size %ld locked %ld\nok\n", atol(size + 7), atol(locked + 6));
    return 0;
}

/* client PORT: one connection to an echo server, and 100,000 bytes. Prints "ok". */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int main(int n, char **v) {
    if (n != 2) return 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(v[1])), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int c = socket(AF_INET, SOCK_STREAM, 0);
    if (c < 0 || connect(c, (void *)&a, sizeof a)) return 2;
    char *sent = malloc(100000), *got = malloc(100000);
    if (!sent || !got) return 3;
    for (int i = 0; i < 100000; i++) sent[i] = i * 7;
    for (size_t at = 0, have = 0; at < 100000; at += have, have = 0) {
        size_t k = 100000 - at > 10000 ? 10000 : 100000 - at;
        if (write(c, sent + at, k) != (ssize_t)k) return 4;
        while (have < k) {
            ssize_t r = read(c, got + at + have, k - have);
            if (r <= 0) return 5;
            have += r;
        }
    }
    if (memcmp(sent, got, 100000)) return 6;
    puts("ok");
    return 0;
}

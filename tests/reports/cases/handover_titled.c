/* report: a super-server that overwrites its environment (dovecot) starts programs that never get a connection
 * kind: a listener that only programs without the library accept from
 * stock: client 2: served
 * path: any
 * monitor: system
 * run: overwrite
 * run: keep
 */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* The program of the super-server, with an environment without LD_PRELOAD. */
static int helper(void) {
    for (int i = 0; i < 3; i++) {
        int s = accept(7, 0, 0);
        write(s, "served", 6);
        close(s);
    }
    return 0;
}

static int client(const char *port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int number;
    sscanf(port, "%d", &number);
    a.sin_port = htons(number);
    for (int i = 0; i < 3; i++) {
        char text[16] = "";
        struct timeval limit = {8, 0};
        int c = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(c, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        connect(c, (void *)&a, sizeof a);
        printf("client %d: %s\n", i, recv(c, text, 15, 0) > 0 ? text : "nothing in 8 s");
        close(c);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "helper"))
        return helper();
    if (argc > 2)
        return client(argv[2]);
    static char preload[4096], *with[2] = {preload, NULL}, *without[] = {"PATH=/usr/bin:/bin", NULL};
    char *end = environ[0];
    for (char **e = environ; *e; e++) {
        if (!strncmp(*e, "LD_PRELOAD=", 11))
            strcpy(preload, *e);
        end = *e + strlen(*e);
    }
    if (argc > 1 && !strcmp(argv[1], "overwrite")) {
        memset(environ[0], 0, end - environ[0]); /* The title overwrites the environment. */
        environ = without;
    }
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    if (bind(listener, (void *)&a, size) || listen(listener, 16))
        return 1;
    getsockname(listener, (void *)&a, &size);
    char port[16];
    sprintf(port, "%d", ntohs(a.sin_port));
    if (fork() == 0)
        execle("/proc/self/exe", "handover_titled", "client", port, NULL, *preload ? with : without);
    struct pollfd p = {listener, POLLIN, 0};
    poll(&p, 1, 20000);
    if (fork() == 0) {
        dup2(listener, 7);
        execle("/proc/self/exe", "handover_titled", "helper", NULL, without);
    }
    while (wait(NULL) > 0)
        ;
    return 0;
}

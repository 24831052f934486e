/* A super-server that writes its title over its first environment, as setproctitle does, and listens afterwards. It
 * waits for a connection and starts a program (its last arguments) that accepts on descriptor 7, in an environment of
 * its own.
 *     titled_super PORT PROGRAM ARGUMENT... */
#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

int main(int argc, char **argv)
{
    static char *none[] = {"PATH=/usr/bin:/bin", NULL};
    if (argc < 3)
        return 2;
    if (environ[0]) {
        char *from = environ[0], *to = from;
        for (char **e = environ; *e; e++)
            to = *e + strlen(*e);
        memset(from, 'x', to - from);
    }
    environ = none;
    int l = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(l, (void *)&a, sizeof a) || listen(l, 16))
        return perror("bind"), 1;
    puts("listens");
    fflush(stdout);
    struct pollfd p = {l, POLLIN, 0};
    if (poll(&p, 1, 30000) != 1)
        return 1;
    if (fork() == 0) {
        dup2(l, 7);
        execve(argv[2], argv + 2, none);
        _exit(1);
    }
    int status;
    wait(&status);
    printf("ended %d\n", status);
    return 0;
}

/* A program that calls nothing of the library's for a while, then connects. Children that share its memory until they
 * end come before and after: one of them makes a socket. PORT [MICROSECONDS before all that] */
#include "talk.h"

#include <fcntl.h>
#include <sys/wait.h>

static void echo(int fd) {
    char back[6];
    put(fd, "hello", 6);
    MUST(recv(fd, back, 6, MSG_WAITALL) == 6 && memcmp(back, "hello", 6) == 0);
}

/* (The child returns nowhere, and changes no variable of the parent's.) */
static void lend(int fd) {
    int status;
    pid_t child = vfork();
    if (child == 0) {
        int s = socket(AF_INET, SOCK_STREAM, 0);
        _exit(s < 0 || close(s) != 0 || (fd >= 0 && close(fd) != 0));
    }
    MUST(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    MUST(argc >= 2);
    usleep(argc > 2 ? (useconds_t)atoi(argv[2]) : 0);
    int status, port = atoi(argv[1]);
    lend(-1);
    pid_t child = fork();
    if (child == 0) {
        /* It begins in a child, and there alone. */
        int fd = dial(port);
        echo(fd);
        _exit(close(fd) != 0);
    }
    MUST(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    MUST(fcntl(900, F_GETFD) == -1);
    int fd = dial(port);
    echo(fd);
    lend(fd);
    echo(fd);
    MUST(close(fd) == 0);
    puts("ok");
    return 0;
}

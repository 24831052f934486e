/* System calls for which musl has no function, made by their numbers, and stdio over a connection. Prints "ok". */
#include "talk.h"

#include <fcntl.h>
#include <netdb.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

static void by_number(int c, int s) {
    char bytes[8] = "numbers", got[8] = "";
    struct iovec out = {bytes, 8}, in = {got, 8};
    struct epoll_event e = {.events = EPOLLIN}, ready;
    struct timespec limit = {10, 0};
    int ep = epoll_create1(0);
    MUST(ep >= 0 && epoll_ctl(ep, EPOLL_CTL_ADD, s, &e) == 0);
    MUST(syscall(SYS_pwritev2, c, &out, 1, -1L, 0L, 0) == 8);
    MUST(syscall(SYS_epoll_pwait2, ep, &ready, 1, &limit, NULL, 8L) == 1);
    MUST(syscall(SYS_preadv2, s, &in, 1, -1L, 0L, 0) == 8 && memcmp(bytes, got, 8) == 0);
    MUST(close(ep) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        char *argv[] = {"sh", "-c", "exit 5", NULL};
        syscall(SYS_execveat, AT_FDCWD, "/bin/sh", argv, environ, 0);
        _exit(1);
    }
    int status;
    MUST(waitpid(pid, &status, 0) == pid && status == 5 << 8);
    MUST(dup2(c, 50) == 50 && syscall(SYS_close_range, 50L, 50L, 0L) == 0 && fcntl(50, F_GETFD) < 0 && errno == EBADF);
    /* As it is for the kernel. */
    MUST(syscall(SYS_close_range, 9L, 8L, 0L) < 0 && errno == EINVAL);
}

static void by_stdio(int c, int s) {
    char line[64] = "";
    MUST(dprintf(c, "%s %d\n", "written", 1) == 10);
    FILE *in = fdopen(s, "r+");
    MUST(in && fileno(in) == s && fgets(line, sizeof line, in) && strcmp(line, "written 1\n") == 0);
    MUST(fprintf(in, "back %d\n", 2) > 0 && fflush(in) == 0);
    MUST(recv(c, line, sizeof line, 0) == 7 && memcmp(line, "back 2\n", 7) == 0);
    MUST(fclose(in) == 0 && recv(c, line, 1, 0) == 0 && close(c) == 0);
}

int main(void) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    struct addrinfo *found, hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM};
    int listener = hear(0);
    MUST(getsockname(listener, (struct sockaddr *)&a, &n) == 0);
    MUST(getaddrinfo("localhost", "7", &hints, &found) == 0);
    freeaddrinfo(found);
    int c = dial(ntohs(a.sin_port)), s = accept(listener, NULL, NULL);
    MUST(s >= 0);
    by_number(c, s);
    by_stdio(c, s);
    puts("ok");
    return 0;
}

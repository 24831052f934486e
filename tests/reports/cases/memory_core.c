/* report: a core of a server with 32 clients is 623 MiB
 * kind: memory
 * stock: core dumped; below 10 MiB: 1
 * path: shm
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <glob.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define CLIENTS 32

static void serve(int listener) {
    char bytes[16];
    for (int i = 0; i < CLIENTS; i++) {
        int s = accept(listener, 0, 0);
        read(s, bytes, 16);
        write(s, "ok", 2);
    }
    pause();
}

static void ask(struct sockaddr_in *a, int done) {
    char bytes[2];
    int c = socket(AF_INET, SOCK_STREAM, 0);
    connect(c, (void *)a, sizeof *a);
    write(c, "SECRET-OF-CLIENT", 16);
    read(c, bytes, 2);
    write(done, "x", 1);
    pause();
}

int main(void) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof a;
    struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_CORE, &unlimited);
    int listener = socket(AF_INET, SOCK_STREAM, 0), done[2];
    bind(listener, (void *)&a, size);
    getsockname(listener, (void *)&a, &size);
    listen(listener, 64);
    pipe(done);
    int server = fork();
    if (!server) {
        serve(listener);
        _exit(0);
    }
    int clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = fork();
        if (!clients[i]) {
            close(listener);
            ask(&a, done[1]);
            _exit(0);
        }
    }
    char byte;
    for (int i = 0; i < CLIENTS; i++)
        read(done[0], &byte, 1);
    kill(server, SIGABRT);
    int status;
    waitpid(server, &status, 0);
    for (int i = 0; i < CLIENTS; i++)
        kill(clients[i], SIGKILL);
    while (wait(0) > 0)
        ;
    glob_t found;
    struct stat core = {0};
    if (!glob("core*", 0, 0, &found))
        stat(found.gl_pathv[0], &core);
    printf("core %s; below 10 MiB: %d\n", WCOREDUMP(status) ? "dumped" : "not dumped", core.st_size > 0 && core.st_size < 10 << 20);
    return 0;
}

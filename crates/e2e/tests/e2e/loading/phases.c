/* Sockets before the library is ready, and after it has been told to end.
 *
 *     phases PORT     talks to an echo server in each phase of a process; last, "ok"
 *
 * Before: an IFUNC resolver (sockets are made, nothing is sent), .preinit_array, and the
 * constructor of a library that this program needs (phases_lib.c). After: atexit, the
 * destructor of that library, and a thread that goes on while main has returned. */
#define _GNU_SOURCE
#include "talk.h"

#include <pthread.h>
#include <poll.h>

int lib_connection(void);
int lib_listener(void);
extern _Atomic int lib_goes_on, lib_has_ended;

static int port, kept, threads_fd;

/* While the loader still relocates: descriptors come and go, whatever they are. */
static int resolved(void) {
    return 41;
}
static int (*resolve(void))(void) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0)
        close(fd);
    return resolved;
}
static int chosen(void) __attribute__((ifunc("resolve")));

static void whole(unsigned seed) {
    int fd = dial(port);
    talk(fd, 7, seed);
    part(fd);
}

static int early;
static void before_all(int argc, char **argv, char **envp) {
    (void)envp;
    if (argc < 2)
        return;
    port = atoi(argv[1]);
    whole(1);
    early = dial(port);
    talk(early, 3, 2);
}
__attribute__((section(".preinit_array"), used)) static void (*preinit)(int, char **, char **) = before_all;

static void at_exit(void) {
    talk(kept, 7, 8);
    whole(9);
    puts("atexit");
    fflush(stdout);
}

/* main has returned, destructors run: this one goes on all the while. */
static void *goes_on(void *arg) {
    (void)arg;
    for (unsigned i = 0; lib_goes_on; i++)
        talk(threads_fd, 7, i);
    part(threads_fd);
    lib_has_ended = 1;
    return NULL;
}

int main(int argc, char **argv) {
    MUST(argc == 2 && chosen() == 41);
    (void)argv;
    /* Connections that were opened before go on. */
    talk(early, 7, 3);
    part(early);
    talk(lib_connection(), 7, 4);
    part(lib_connection());
    /* A listener of that time serves. */
    struct sockaddr_in a;
    socklen_t len = sizeof a;
    MUST(getsockname(lib_listener(), (struct sockaddr *)&a, &len) == 0);
    int client = dial(ntohs(a.sin_port));
    struct pollfd p = {.fd = lib_listener(), .events = POLLIN};
    MUST(poll(&p, 1, 10000) == 1);
    int server = accept(lib_listener(), NULL, NULL);
    MUST(server >= 0);
    put(client, "x", 1);
    MUST(echo_some(server) == 1);
    char c;
    MUST(recv(client, &c, 1, 0) == 1 && c == 'x');
    MUST(close(client) == 0 && close(server) == 0);

    whole(5);
    kept = dial(port);
    threads_fd = dial(port);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, goes_on, NULL) == 0);
    MUST(pthread_detach(thread) == 0);
    MUST(atexit(at_exit) == 0);
    return 0;
}

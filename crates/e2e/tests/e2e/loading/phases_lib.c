/* The library that phases.c needs: its constructor runs before, its destructor after
 * those of a preloaded one. */
#define _GNU_SOURCE
#include "talk.h"

int lib_connection(void);
int lib_listener(void);
extern _Atomic int lib_goes_on, lib_has_ended;

/* For the thread of the program that uses sockets until the very end. */
_Atomic int lib_goes_on = 1, lib_has_ended;

static int port, connection, listener;

int lib_connection(void) {
    return connection;
}

int lib_listener(void) {
    return listener;
}

__attribute__((constructor)) static void begin(int argc, char **argv) {
    if (argc < 2)
        return;
    port = atoi(argv[1]);
    listener = hear(0);
    int fd = dial(port);
    talk(fd, 7, 6);
    part(fd);
    connection = dial(port);
    talk(connection, 3, 7);
}

__attribute__((destructor)) static void end(void) {
    if (!port)
        return;
    int fd = dial(port);
    talk(fd, 7, 10);
    part(fd);
    lib_goes_on = 0;
    for (int i = 0; i < 3000 && !lib_has_ended; i++)
        usleep(10000);
    MUST(lib_has_ended);
    puts("ok");
    fflush(stdout);
}

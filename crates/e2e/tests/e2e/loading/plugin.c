/* A plugin (unload.c) that opens a connection, and uses one until it ends. */
#define _GNU_SOURCE
#include "talk.h"

int plugin_open(int port);

int plugin_open(int port) {
    int whole = dial(port), fd = dial(port);
    talk(whole, 7, 11);
    part(whole);
    talk(fd, 7, 12);
    return fd;
}

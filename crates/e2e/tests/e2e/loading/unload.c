/* Libraries that come and go.
 *
 *     unload PORT LIBFSOCKET PLUGIN      talks to an echo server; last, "ok"
 *
 * The library itself, loaded and unloaded (it stays, whatever dlclose says), also used
 * by name through the handle; and a plugin (plugin.c) that has opened connections when it goes. */
#define _GNU_SOURCE
#include "talk.h"

#include <dlfcn.h>

static int port;

static void whole(unsigned seed) {
    int fd = dial(port);
    talk(fd, 7, seed);
    part(fd);
}

#define NAME(handle, name)                                                                         \
    __typeof__(&name) my_##name = (__typeof__(&name))(uintptr_t)dlsym(handle, #name);              \
    MUST(my_##name)

/* A program that has found the functions by name, and goes on calling them after dlclose. */
static void by_name(void *handle) {
    NAME(handle, socket);
    NAME(handle, connect);
    NAME(handle, send);
    NAME(handle, recv);
    NAME(handle, shutdown);
    NAME(handle, close);
    struct sockaddr_in a = loopback(port);
    int fd = my_socket(AF_INET, SOCK_STREAM, 0);
    MUST(fd >= 0 && my_connect(fd, (struct sockaddr *)&a, sizeof a) == 0);
    for (int i = 0; i < 20; i++) {
        char out[100], in[100];
        memset(out, i, sizeof out);
        MUST(my_send(fd, out, sizeof out, MSG_NOSIGNAL) == sizeof out);
        MUST(my_recv(fd, in, sizeof in, MSG_WAITALL) == sizeof in && memcmp(in, out, sizeof in) == 0);
        if (i == 10)
            MUST(dlclose(handle) == 0);
    }
    char c;
    MUST(my_shutdown(fd, SHUT_WR) == 0 && my_recv(fd, &c, 1, 0) == 0 && my_close(fd) == 0);
}

int main(int argc, char **argv) {
    MUST(argc == 4);
    port = atoi(argv[1]);
    whole(1);
    for (int i = 0; i < 4; i++) {
        int fd = dial(port);
        void *handle = dlopen(argv[2], i % 2 ? RTLD_NOW | RTLD_GLOBAL : RTLD_LAZY);
        if (!handle)
            fprintf(stderr, "%s\n", dlerror());
        MUST(handle);
        talk(fd, 7, 2);
        MUST(dlclose(handle) == 0);
        talk(fd, 7, 3);
        part(fd);
        whole(4);
    }
    void *handle = dlopen(argv[2], RTLD_NOW);
    MUST(handle);
    by_name(handle);
    for (unsigned i = 0; i < 4; i++) {
        void *plugin = dlopen(argv[3], RTLD_NOW);
        MUST(plugin);
        int (*open_one)(int) = (int (*)(int))(uintptr_t)dlsym(plugin, "plugin_open");
        MUST(open_one);
        int fd = open_one(port);
        MUST(dlclose(plugin) == 0);
        MUST(dlopen(argv[3], RTLD_NOW | RTLD_NOLOAD) == NULL);
        talk(fd, 14, i);
        part(fd);
    }
    puts("ok");
    return 0;
}

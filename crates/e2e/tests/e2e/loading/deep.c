/* A program whose plugins look for functions in their own dependencies first.
 *
 *     deep PORT PLUGIN…      talks to an echo server, twice for each plugin; last, "ok"
 *
 * One connection is there when the plugin (deep_plugin.c) is loaded, the other is not. */
#define _GNU_SOURCE
#include "talk.h"

#include <dlfcn.h>

int main(int argc, char **argv) {
    MUST(argc >= 3);
    int port = atoi(argv[1]);
    for (int i = 2; i < argc; i++) {
        int before = dial(port);
        talk(before, 7, 1);
        void *handle = dlopen(argv[i], RTLD_LAZY | RTLD_GLOBAL | RTLD_DEEPBIND);
        if (!handle)
            fprintf(stderr, "%s\n", dlerror());
        MUST(handle && !dlerror());
        int (*go_on)(int) = (int (*)(int))(uintptr_t)dlsym(handle, "plugin_talk");
        MUST(go_on && go_on(before) == 0);
        int after = dial(port);
        MUST(go_on(after) == 0);
        MUST(!dlopen("/nowhere/plugin.so", RTLD_NOW | RTLD_DEEPBIND) && strstr(dlerror(), "/nowhere"));
    }
    puts("ok");
    return 0;
}

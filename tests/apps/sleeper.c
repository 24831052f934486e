/* Prints whether libraries are preloaded, then sleeps. With an argument it ends at once. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv) {
    const char *list = getenv("LD_PRELOAD");
    (void)argv;
    printf("ok %s\n", list && *list ? "preloaded" : "stock");
    fflush(stdout);
    if (argc == 1)
        sleep(600);
    return 0;
}

/* Says that it runs, and sleeps. */
#include <stdio.h>
#include <unistd.h>

int main(void) {
    puts("ok");
    fflush(stdout);
    sleep(600);
    return 0;
}

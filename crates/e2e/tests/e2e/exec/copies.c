/* Copies its standard input to its standard output. */
#include <unistd.h>

int main(void) {
    char buf[4096];
    ssize_t n;
    while ((n = read(0, buf, sizeof buf)) > 0)
        if (write(1, buf, (size_t)n) != n) return 1;
    return n < 0;
}

/* report: mlockall fails in a program without sockets under the usual limit of 8 MiB
 * kind: memory
 * stock: limit 8 MiB: mlockall 0
 * path: any
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc > 1) {
        int result = mlockall(MCL_CURRENT | MCL_FUTURE);
        printf("limit 8 MiB: mlockall %d %s\n", result, result ? strerror(errno) : "");
        return 0;
    }
    struct rlimit limit = {8 << 20, 8 << 20};
    if (setrlimit(RLIMIT_MEMLOCK, &limit) || setgid(65534) || setuid(65534))
        return 1;
    execl("/proc/self/exe", "memory_mlock", "child", NULL);
    return 1;
}

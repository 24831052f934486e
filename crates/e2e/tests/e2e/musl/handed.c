/* A connection that another process or program goes on with.
 *
 *     handed exec|fork|spawn|vfork|shells PORT PROGRAM...    the first program resumes, and hands on to the rest
 *     handed resume NUMBER PROGRAM...                        of a connection that was inherited under that number
 */
#include "talk.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

extern char **environ;

enum { MESSAGES = 7 };

static void ended(pid_t pid) {
    int status;
    MUST(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

/* Arguments of the next program: itself, "resume", the number, and those behind it. */
static char **arguments(int fd, char **next) {
    static char number[12], *argv[16];
    int n = 0;
    snprintf(number, sizeof number, "%d", fd);
    argv[n++] = next[0];
    argv[n++] = "resume";
    argv[n++] = number;
    for (next++; *next; next++) {
        MUST(n < 15);
        argv[n++] = *next;
    }
    return argv;
}

static void start(const char *how, int fd, char **next) {
    char **argv = arguments(fd, next);
    if (strcmp(how, "exec") == 0) {
        execv(argv[0], argv);
        MUST(!"exec");
    }
    pid_t pid = -1;
    if (strcmp(how, "spawn") == 0) {
        posix_spawn_file_actions_t actions;
        MUST(posix_spawn_file_actions_init(&actions) == 0);
        MUST(posix_spawn_file_actions_adddup2(&actions, fd, 77) == 0);
        snprintf(argv[2], 12, "77");
        MUST(posix_spawn(&pid, argv[0], &actions, NULL, argv, environ) == 0);
        MUST(posix_spawn_file_actions_destroy(&actions) == 0);
    } else if (strcmp(how, "vfork") == 0) {
        pid = vfork();
        if (pid == 0) {
            execv(argv[0], argv);
            _exit(1);
        }
    } else
        MUST(!"how");
    ended(pid);
}

static void in_child(int fd) {
    pid_t pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        talk(fd, MESSAGES, 2);
        _exit(0);
    }
    ended(pid);
    talk(fd, MESSAGES, 3);
}

/* libc starts a shell, twice, while the connection is open. */
static void beside_shells(int fd) {
    char line[20] = "";
    MUST(fcntl(fd, F_SETFD, FD_CLOEXEC) == 0);
    MUST(system("exit 3") == 3 << 8);
    talk(fd, MESSAGES, 4);
    FILE *f = popen("echo asked", "r");
    MUST(f && fgets(line, sizeof line, f) && strcmp(line, "asked\n") == 0 && pclose(f) == 0);
    talk(fd, MESSAGES, 5);
}

int main(int argc, char **argv) {
    MUST(argc >= 3);
    const char *how = argv[1];
    int fd = atoi(argv[2]);
    if (strcmp(how, "resume") == 0) {
        talk(fd, MESSAGES, 6);
        if (argc > 3)
            start("exec", fd, argv + 3);
    } else {
        fd = dial(fd);
        talk(fd, MESSAGES, 1);
        MUST(fcntl(fd, F_SETFD, 0) == 0);
        if (strcmp(how, "fork") == 0)
            in_child(fd);
        else if (strcmp(how, "shells") == 0)
            beside_shells(fd);
        else
            start(how, fd, argv + 3);
    }
    if (strcmp(how, "spawn") == 0 || strcmp(how, "vfork") == 0) {
        /* The child has ended the connection. */
        MUST(close(fd) == 0);
        return 0;
    }
    part(fd);
    puts("ok");
    return 0;
}

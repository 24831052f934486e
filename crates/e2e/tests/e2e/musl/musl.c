#include <errno.h>
// What a program does that has another libc: "musl" prints "ok" if processes, threads and connections work.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static void need(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

/* A signal of somebody else's may interrupt it. */
static int ready(int ep, struct epoll_event *e)
{
	int n;
	do
		n = epoll_wait(ep, e, 1, 60000);
	while (n < 0 && errno == EINTR);
	return n;
}

static void *serve(void *listener)
{
	char buf[100];
	int c = accept(*(int *)listener, NULL, NULL), ep = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN };
	need(c >= 0 && ep >= 0 && !epoll_ctl(ep, EPOLL_CTL_ADD, c, &e), "accept");
	for (ssize_t n; need(ready(ep, &e) == 1, "epoll"), (n = read(c, buf, sizeof buf)) > 0;)
		need(send(c, buf, n, 0) == n, "send");
	return close(c), NULL;
}

static void child(const char *how, pid_t pid)
{
	int status;
	need(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0, how);
}

int main(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof at;
	int l = socket(AF_INET, SOCK_STREAM, 0), c = socket(AF_INET, SOCK_STREAM, 0), pipes[2];
	pthread_t thread;
	char buf[100], *argv[] = { "sh", "-c", "echo spawned", NULL };
	need(!bind(l, (void *)&at, len) && !listen(l, 5) && !getsockname(l, (void *)&at, &len), "listen");
	need(!pthread_create(&thread, NULL, serve, &l), "thread");
	need(!connect(c, (void *)&at, len), "connect");
	for (int i = 0; i < 100; i++) {
		struct iovec iov = { buf, sizeof buf };
		struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
		memset(buf, i, sizeof buf);
		need(sendmsg(c, &m, 0) == sizeof buf && recv(c, buf, sizeof buf, MSG_WAITALL) == sizeof buf, "echo");
		need(buf[99] == i, "bytes");
	}
	pid_t pid = fork();
	if (!pid)
		_exit(write(c, "x", 1) != 1 || read(c, buf, 1) != 1);
	child("fork", pid);
	close(c);
	pthread_join(thread, NULL);
	posix_spawn_file_actions_t actions;
	need(!pipe(pipes) && !posix_spawn_file_actions_init(&actions), "pipe");
	need(!posix_spawn_file_actions_adddup2(&actions, pipes[1], 1), "actions");
	need(!posix_spawnp(&pid, "sh", &actions, NULL, argv, environ), "spawn");
	child("spawned", pid);
	need(read(pipes[0], buf, sizeof buf) == 8 && !memcmp(buf, "spawned\n", 8), "output");
	need(system("exit 3") == 3 << 8, "system");
	FILE *f = popen("echo asked", "r");
	need(f && fgets(buf, sizeof buf, f) && !strcmp(buf, "asked\n") && !pclose(f), "popen");
	pid = vfork();
	if (!pid) {
		execl("/bin/sh", "sh", "-c", "exit 0", NULL);
		_exit(1);
	}
	child("exec", pid);
	return puts("ok") < 0;
}

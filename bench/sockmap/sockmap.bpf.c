/* The experiment of ADR 56: what a program sends on a loopback connection (IPv4) of its cgroup is put
 * directly into the queue of the other end, where both ends are in the map. Not part of the product. */
#include <linux/bpf.h>

#define SEC(name) __attribute__((section(name), used))
#define swap32(x) __builtin_bswap32(x)

static long (*const sock_hash_update)(struct bpf_sock_ops *, void *, void *, __u64) = (void *)BPF_FUNC_sock_hash_update;
static long (*const msg_redirect_hash)(struct sk_msg_md *, void *, void *, __u64) = (void *)BPF_FUNC_msg_redirect_hash;

char LICENSE[] SEC("license") = "GPL";

/* One end: addresses in network byte order, ports in the host's. */
struct end {
	__u32 local, remote;
	__u32 local_port, remote_port;
};

struct {
	int (*type)[BPF_MAP_TYPE_SOCKHASH];
	int (*max_entries)[65536];
	struct end *key;
	__u64 *value;
} ends SEC(".maps");

/* Read by the script: messages that were redirected, and those that went through TCP. */
volatile __u64 redirected, passed;

SEC("sockops")
int add(struct bpf_sock_ops *s)
{
	struct end e;

	if (s->op != BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB && s->op != BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB)
		return 1;
	if (s->family != 2 || (s->local_ip4 & 0xff) != 127)
		return 1;
	e = (struct end){ s->local_ip4, s->remote_ip4, s->local_port, swap32(s->remote_port) };
	sock_hash_update(s, &ends, &e, BPF_NOEXIST);
	return 1;
}

SEC("sk_msg")
int redirect(struct sk_msg_md *m)
{
	struct end other = { m->remote_ip4, m->local_ip4, swap32(m->remote_port), m->local_port };

	if (msg_redirect_hash(m, &ends, &other, BPF_F_INGRESS) == SK_PASS)
		__sync_fetch_and_add(&redirected, 1);
	else
		__sync_fetch_and_add(&passed, 1);
	return SK_PASS;
}

/* An example of an operator's own policy: each client address has its CPU. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include "steer_policy.h"

char LICENSE[] SEC("license") = "GPL";

/* A power of two, because the verifier cannot follow a division. */
#define CPUS 2

SEC("xdp")
int by_address(struct xdp_md *ctx)
{
	struct steer_packet *packet = steer_packet();

	if (!packet)
		return XDP_PASS;
	/* The last byte of the address, which is in network byte order. */
	return steer_to(packet, (packet->remote_ip[3] >> 24) & (CPUS - 1));
}

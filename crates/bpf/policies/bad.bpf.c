/* For tests: reads beyond the end of the packet, so the verifier rejects it. */
#include "vmlinux.h"
#include <bpf/bpf_helpers.h>
#include "steer_policy.h"

char LICENSE[] SEC("license") = "GPL";

SEC("xdp")
int bad(struct xdp_md *ctx)
{
	struct steer_packet *packet = steer_packet();

	return packet ? steer_to(packet, ((volatile __u32 *)packet)[1000]) : XDP_PASS;
}

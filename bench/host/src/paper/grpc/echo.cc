// Unary calls of gRPC in C++, as its own examples make them.
//   echo serve            prints its port, then serves until it is killed
//   echo ask PORT SECONDS prints the median of a call in nanoseconds

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <string>
#include <vector>

#include "echo.pb.cc"
#include "echo.grpc.pb.cc"

class Calls final : public bench::Calls::Service {
    grpc::Status Echo(grpc::ServerContext*, const bench::Message* asked, bench::Message* answer) override {
        *answer = *asked;
        return grpc::Status::OK;
    }
};

static int serve() {
    Calls calls;
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&calls);
    auto server = builder.BuildAndStart();
    if (!server || !port) return 1;
    std::cout << port << std::endl;
    server->Wait();
    return 0;
}

static int ask(const std::string& port, double seconds) {
    auto calls = bench::Calls::NewStub(grpc::CreateChannel("127.0.0.1:" + port, grpc::InsecureChannelCredentials()));
    bench::Message asked, answer;
    asked.set_text(std::string(1024, 'x'));
    auto call = [&] {
        grpc::ClientContext context;
        grpc::Status status = calls->Echo(&context, asked, &answer);
        if (!status.ok()) std::cerr << status.error_message() << std::endl;
        return status.ok() && answer.text() == asked.text();
    };
    using clock = std::chrono::steady_clock;
    if (!call()) return 1;
    std::vector<double> times;
    auto end = clock::now() + std::chrono::duration<double>(seconds);
    for (auto began = clock::now(); began < end; began = clock::now()) {
        if (!call()) return 1;
        times.push_back(std::chrono::duration<double, std::nano>(clock::now() - began).count());
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    std::cout << times[times.size() / 2] << std::endl;
    return 0;
}

int main(int argc, char** argv) {
    if (argc == 2 && argv[1] == std::string("serve")) return serve();
    if (argc == 4 && argv[1] == std::string("ask")) return ask(argv[2], std::stod(argv[3]));
    return 2;
}

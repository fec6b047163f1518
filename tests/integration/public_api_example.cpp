#include "public_api_example.hpp"

#include <utility>

namespace deltasync::example {
namespace {

CallOptions deadline() {
  return CallOptions::within(std::chrono::seconds(60));
}

Result<PullReport> pull_newest(Receiver& receiver) {
  DS_ASSIGN(const auto update, receiver.pull({}, deadline()));
  DS_TRY(update->commit());
  return update->report();
}

Result<std::unique_ptr<Receiver>> connect(const std::string& endpoint) {
  ReceiverOptions options;
  options.endpoint = endpoint;
  options.streams = 2;
  return Receiver::connect(options, deadline());
}

}  // namespace

Status train(const std::string& agent_socket, const LayoutPtr& layout, const std::vector<std::byte>& bytes,
             const Version& version) {
  WriterOptions options;
  options.agent_socket = agent_socket;
  DS_ASSIGN(const auto writer, Writer::attach(layout, Sidecar(), options, deadline()));
  std::vector<std::pair<std::string, Source>> tensors;
  std::size_t at = 0;
  for (const Tensor& tensor : layout->tensors()) {
    tensors.emplace_back(tensor.spec.name, Source{bytes.data() + at});
    at += static_cast<std::size_t>(tensor.bytes);
  }
  DS_TRY(writer->offload(version, tensors, deadline()));
  return writer->wait_ready(version.id, deadline());
}

Result<std::vector<std::byte>> serve_from_memory(const std::string& endpoint) {
  DS_ASSIGN(const auto receiver, connect(endpoint));
  DS_TRY(receiver->bind(make_host_target(receiver->layout()), deadline()));
  DS_TRY(pull_newest(*receiver));
  const std::span<const std::byte> memory = host_target_memory(*receiver->target());
  std::vector<std::byte> bytes;
  for (const Tensor& tensor : receiver->layout()->tensors()) {
    const auto part = memory.subspan(static_cast<std::size_t>(tensor.offset), static_cast<std::size_t>(tensor.bytes));
    bytes.insert(bytes.end(), part.begin(), part.end());
  }
  return bytes;
}

Result<PullReport> serve_from_directory(const std::string& endpoint, const std::filesystem::path& out) {
  DS_ASSIGN(const auto receiver, connect(endpoint));
  DS_ASSIGN(std::unique_ptr<Target> target, make_hf_target(receiver->layout(), receiver->sidecar(), out));
  DS_TRY(receiver->bind(std::move(target), deadline()));
  return pull_newest(*receiver);
}

}  // namespace deltasync::example

// libucp, opened at run time: what of its stable interface (ucp/api/ucp.h of UCX 1.x) is used here, as that has it. The
// build needs nothing of UCX; where its headers are, a test compares these declarations with them.
#pragma once

#include <sys/socket.h>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <string>

#include "deltasync/result.hpp"

namespace deltasync::net::ucx {

using UcsStatus = signed char;  ///< a packed enumeration: 0 good, 1 under way, below 0 an error
inline constexpr UcsStatus kOk = 0;
inline constexpr UcsStatus kUnderWay = 1;
inline constexpr UcsStatus kBusy = -15;
inline constexpr UcsStatus kEnded = -100;  ///< below it a pointer is none

struct Context;
struct Worker;
struct Ep;
struct Config;
struct Address;

struct ContextParams {
  std::uint64_t field_mask;
  std::uint64_t features;
  std::size_t request_size;
  void (*request_init)(void*);
  void (*request_cleanup)(void*);
  std::uint64_t tag_sender_mask;
  int mt_workers_shared;
  std::size_t estimated_num_eps;
  std::size_t estimated_num_ppn;
  const char* name;
  std::size_t node_local_id;
};
inline constexpr std::uint64_t kContextFeatures = 1u << 0;
inline constexpr std::uint64_t kContextWorkersShared = 1u << 5;
inline constexpr std::uint64_t kFeatureWakeup = 1u << 4;
inline constexpr std::uint64_t kFeatureAm = 1u << 6;

struct WorkerParams {
  std::uint64_t field_mask;
  int thread_mode;
  unsigned long cpu_mask[1024 / (8 * sizeof(unsigned long))];
  unsigned events;
  void* user_data;
  int event_fd;
  std::uint64_t flags;
  const char* name;
  std::size_t am_alignment;
  std::uint64_t client_id;
};
inline constexpr std::uint64_t kWorkerThreadMode = 1u << 0;
inline constexpr int kThreadsSerialized = 1;

using ErrorHandler = void (*)(void* arg, Ep* ep, UcsStatus status);
struct SocketAddress {
  const sockaddr* addr;
  socklen_t addrlen;
};
struct EpParams {
  std::uint64_t field_mask;
  const Address* address;
  int err_mode;
  struct {
    ErrorHandler cb;
    void* arg;
  } err_handler;
  void* user_data;
  unsigned flags;
  SocketAddress sockaddr;
  void* conn_request;
  const char* name;
  SocketAddress local_sockaddr;
};
inline constexpr std::uint64_t kEpAddress = 1u << 0;
inline constexpr std::uint64_t kEpErrorMode = 1u << 1;
inline constexpr std::uint64_t kEpErrorHandler = 1u << 2;
inline constexpr int kErrorsOfPeer = 1;

struct Transport {
  const char* transport_name;
  const char* device_name;
};
struct EpAttributes {
  std::uint64_t field_mask;
  char name[32];
  sockaddr_storage local_sockaddr;
  sockaddr_storage remote_sockaddr;
  struct {
    Transport* entries;
    unsigned num_entries;
    std::size_t entry_size;
  } transports;
  void* user_data;
};
inline constexpr std::uint64_t kEpTransports = 1u << 3;

struct MessageParams {
  std::uint64_t recv_attr;
  Ep* reply_ep;
};
inline constexpr std::uint64_t kMessageRendezvous = 1u << 17;
using MessageHandler = UcsStatus (*)(void* arg, const void* header, std::size_t header_bytes, void* data,
                                     std::size_t bytes, const MessageParams* params);
struct HandlerParams {
  std::uint64_t field_mask;
  unsigned id;
  std::uint32_t flags;
  MessageHandler cb;
  void* arg;
};
inline constexpr std::uint64_t kHandlerId = 1u << 0;
inline constexpr std::uint64_t kHandlerCall = 1u << 2;
inline constexpr std::uint64_t kHandlerArg = 1u << 3;

using SentCall = void (*)(void* request, UcsStatus status, void* user_data);
using ReceivedCall = void (*)(void* request, UcsStatus status, std::size_t bytes, void* user_data);
struct RequestParams {
  std::uint32_t op_attr_mask;
  std::uint32_t flags;
  void* request;
  union {
    SentCall send;
    ReceivedCall recv_am;
  } cb;
  std::uint64_t datatype;
  void* user_data;
  void* reply_buffer;
  int memory_type;
  void* recv_info;
  void* memh;
  std::uint64_t remote_datatype;
  const void* remote;
  std::size_t remote_count;
};
inline constexpr std::uint32_t kRequestCall = 1u << 1;
inline constexpr std::uint32_t kRequestUserData = 1u << 2;
inline constexpr std::uint32_t kRequestFlags = 1u << 4;
inline constexpr std::uint32_t kCloseForced = 1u << 0;

/// What a call that may go on returns: null (done), an error, or a request.
inline bool is_error(const void* returned) {
  return reinterpret_cast<std::uintptr_t>(returned) >= static_cast<std::uintptr_t>(std::intptr_t{kEnded});
}
inline UcsStatus status_of(const void* returned) {
  return is_error(returned) ? static_cast<UcsStatus>(reinterpret_cast<std::intptr_t>(returned)) : kUnderWay;
}

/// libucs takes over signals for its own debugging, so that a hang-up no longer ends its user's process: what each of
/// them did before is put back.
class KeptSignals {
 public:
  KeptSignals();
  ~KeptSignals();
  KeptSignals(const KeptSignals&) = delete;
  KeptSignals& operator=(const KeptSignals&) = delete;

 private:
  static constexpr std::array kSignals{SIGHUP, SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV};
  std::array<struct sigaction, kSignals.size()> before_{};
};

/// The functions that are used, as libucp and libucs have them.
struct Library {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release) = nullptr;
  UcsStatus (*config_read)(const char* prefix, const char* file, Config** config) = nullptr;
  UcsStatus (*config_modify)(Config* config, const char* name, const char* value) = nullptr;
  void (*config_release)(Config* config) = nullptr;
  UcsStatus (*init)(unsigned major, unsigned minor, const ContextParams* params, const Config* config,
                    Context** context) = nullptr;
  void (*cleanup)(Context* context) = nullptr;
  UcsStatus (*worker_create)(Context* context, const WorkerParams* params, Worker** worker) = nullptr;
  void (*worker_destroy)(Worker* worker) = nullptr;
  UcsStatus (*worker_get_address)(Worker* worker, Address** address, std::size_t* bytes) = nullptr;
  void (*worker_release_address)(Worker* worker, Address* address) = nullptr;
  UcsStatus (*worker_get_efd)(Worker* worker, int* fd) = nullptr;
  UcsStatus (*worker_arm)(Worker* worker) = nullptr;
  unsigned (*worker_progress)(Worker* worker) = nullptr;
  UcsStatus (*worker_set_am_recv_handler)(Worker* worker, const HandlerParams* params) = nullptr;
  UcsStatus (*ep_create)(Worker* worker, const EpParams* params, Ep** ep) = nullptr;
  void* (*ep_close)(Ep* ep, const RequestParams* params) = nullptr;
  UcsStatus (*ep_query)(Ep* ep, EpAttributes* attributes) = nullptr;
  void* (*am_send)(Ep* ep, unsigned id, const void* header, std::size_t header_bytes, const void* data,
                   std::size_t bytes, const RequestParams* params) = nullptr;
  void* (*am_recv_data)(Worker* worker, void* described, void* to, std::size_t bytes,
                        const RequestParams* params) = nullptr;
  void (*am_data_release)(Worker* worker, void* data) = nullptr;
  UcsStatus (*request_check_status)(void* request) = nullptr;
  void (*request_free)(void* request) = nullptr;
  const char* (*status_string)(UcsStatus status) = nullptr;

  std::string name;                  ///< that it was opened by
  std::string version;               ///< "1.22.0"
  std::uint32_t version_number = 0;  ///< major << 16 | minor

  /// `unsupported`, naming the library and what to do, if it is missing, lacks a function or is too old. Stays open for
  /// as long as the process runs. Its warnings and errors go to our log from then on.
  static Result<Library> open(const std::string& name);

  std::string words(UcsStatus status) const { return status_string(status); }
};

/// The oldest that is known to survive the death of a peer at any moment.
struct OldestVersion {
  static constexpr unsigned kMajor = 1;
  static constexpr unsigned kMinor = 22;
};

}  // namespace deltasync::net::ucx

#include "net/http_stream.hpp"

#include <boost/beast/http/write.hpp>

#include <algorithm>
#include <array>
#include <sstream>

#include "net/coroutine.hpp"

namespace deltasync::net {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;

namespace {

constexpr std::size_t kReadBytes = 4096;

}  // namespace

asio::awaitable<error_code> read_request(ChannelStream& stream, beast::flat_buffer& buffer, HttpRequestParser& parser,
                                         Deadline deadline) {
  parser.eager(true);
  for (;;) {
    if (buffer.size() > 0) {
      error_code ec;
      buffer.consume(parser.put(buffer.data(), ec));
      if (ec && ec != http::error::need_more) co_return ec;
      if (parser.is_done()) co_return error_code();
    }
    const std::size_t room = std::min(buffer.max_size() - buffer.size(), kReadBytes);
    if (room == 0) co_return make_error_code(http::error::buffer_overflow);
    const auto to = buffer.prepare(room);
    // A peer that sends byte by byte always has something to be read.
    if (deadline.passed()) co_return make_error_code(http::error::partial_message);
    const auto read =
        co_await stream.read_some({static_cast<std::byte*>(to.data()), to.size()}, deadline, "receiving a request");
    if (!read) co_return make_error_code(http::error::partial_message);
    buffer.commit(*read);
  }
}

asio::awaitable<Status> write_response(ChannelStream& stream, const HttpResponse& response, Deadline deadline) {
  std::ostringstream head;
  head << response.base();
  const std::string head_text = head.str();
  std::array<std::string_view, 2> parts{head_text, response.body()};
  while (!parts[0].empty() || !parts[1].empty()) {
    std::array<iovec, 2> pieces;
    std::size_t used = 0;
    for (const std::string_view part : parts) {
      if (!part.empty()) pieces[used++] = {const_cast<char*>(part.data()), part.size()};
    }
    if (deadline.passed()) co_return Error(Errc::timed_out, "sending a page: the deadline passed");
    co_await stream.give_way();
    DS_CO_ASSIGN(std::size_t left, co_await stream.write_some({pieces.data(), used}, deadline, "sending a page"));
    for (std::string_view& part : parts) {
      const std::size_t taken = std::min(left, part.size());
      part.remove_prefix(taken);
      left -= taken;
    }
  }
  co_return Status();
}

}  // namespace deltasync::net

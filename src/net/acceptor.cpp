#include "net/acceptor.hpp"

#include <boost/asio/strand.hpp>

#include "net/blocking.hpp"

namespace deltasync::net {

namespace asio = boost::asio;
using asio::ip::tcp;

Result<tcp::acceptor> bind_acceptor(asio::io_context& io, const Endpoint& where) {
  const std::string what = "listen on " + to_string(where);
  boost::system::error_code ec;
  tcp::resolver resolver(io);
  const auto found = resolver.resolve(where.host, std::to_string(where.port),
                                      tcp::resolver::passive | tcp::resolver::numeric_service, ec);
  if (ec || found.empty()) return Error(Errc::invalid_argument, what + ": " + ec.message());
  const tcp::endpoint endpoint = found.begin()->endpoint();
  tcp::acceptor acceptor(asio::make_strand(io));
  acceptor.open(endpoint.protocol(), ec);
  if (!ec) acceptor.set_option(tcp::acceptor::reuse_address(true), ec);
  if (!ec) acceptor.bind(endpoint, ec);
  if (!ec && endpoint.address().is_loopback()) use_no_pacing(acceptor.native_handle());
  if (!ec) acceptor.listen(asio::socket_base::max_listen_connections, ec);
  if (ec == asio::error::address_in_use)
    return Error(Errc::already_exists, what + ": " + ec.message() + ": choose another port, or 0 for a free one");
  if (ec) return Error::from_errno(what, ec.value());
  return acceptor;
}

}  // namespace deltasync::net

// One HTTP request read, one response written, over a channel.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/message.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include "net/channel_stream.hpp"

namespace deltasync::net {

using HttpRequest = boost::beast::http::request<boost::beast::http::string_body>;
using HttpRequestParser = boost::beast::http::request_parser<boost::beast::http::string_body>;
using HttpResponse = boost::beast::http::response<boost::beast::http::string_body>;

/// What `buffer` holds comes first, and what follows the request stays in it. An error of Beast's says what is wrong
/// with the request; partial_message that the peer left or the deadline passed before it was whole.
boost::asio::awaitable<boost::system::error_code> read_request(ChannelStream& stream, boost::beast::flat_buffer& buffer,
                                                               HttpRequestParser& parser, Deadline deadline);

boost::asio::awaitable<Status> write_response(ChannelStream& stream, const HttpResponse& response, Deadline deadline);

}  // namespace deltasync::net

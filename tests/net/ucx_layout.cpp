// Our declarations of libucp against its own header, where there is one.
#include <cstddef>

#include <ucp/api/ucp.h>

#include "net/ucx/library.hpp"

namespace deltasync::net::ucx {
namespace {

#define SAME_PLACE(Ours, our_field, Theirs, their_field)                      \
  static_assert(offsetof(Ours, our_field) == offsetof(Theirs, their_field) && \
                sizeof(Ours::our_field) == sizeof(Theirs::their_field))
#define SAME(Ours, Theirs, field) SAME_PLACE(Ours, field, Theirs, field)

static_assert(sizeof(UcsStatus) == sizeof(ucs_status_t));
static_assert(kOk == UCS_OK && kUnderWay == UCS_INPROGRESS && kBusy == UCS_ERR_BUSY && kEnded == UCS_ERR_LAST);

static_assert(sizeof(ContextParams) == sizeof(ucp_params_t));
SAME(ContextParams, ucp_params_t, features);
SAME(ContextParams, ucp_params_t, mt_workers_shared);
SAME(ContextParams, ucp_params_t, node_local_id);
static_assert(kContextFeatures == UCP_PARAM_FIELD_FEATURES &&
              kContextWorkersShared == UCP_PARAM_FIELD_MT_WORKERS_SHARED);
static_assert(kFeatureAm == UCP_FEATURE_AM && kFeatureWakeup == UCP_FEATURE_WAKEUP);

static_assert(sizeof(WorkerParams) == sizeof(ucp_worker_params_t));
SAME(WorkerParams, ucp_worker_params_t, thread_mode);
SAME(WorkerParams, ucp_worker_params_t, client_id);
static_assert(kWorkerThreadMode == UCP_WORKER_PARAM_FIELD_THREAD_MODE &&
              kThreadsSerialized == UCS_THREAD_MODE_SERIALIZED);

static_assert(sizeof(EpParams) == sizeof(ucp_ep_params_t));
SAME(EpParams, ucp_ep_params_t, address);
SAME(EpParams, ucp_ep_params_t, err_mode);
SAME(EpParams, ucp_ep_params_t, err_handler);
SAME(EpParams, ucp_ep_params_t, local_sockaddr);
static_assert(kEpAddress == UCP_EP_PARAM_FIELD_REMOTE_ADDRESS && kEpErrorMode == UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE &&
              kEpErrorHandler == UCP_EP_PARAM_FIELD_ERR_HANDLER && kErrorsOfPeer == UCP_ERR_HANDLING_MODE_PEER);

static_assert(sizeof(Transport) == sizeof(ucp_transport_entry_t) && sizeof(EpAttributes) == sizeof(ucp_ep_attr_t));
SAME(EpAttributes, ucp_ep_attr_t, transports);
static_assert(kEpTransports == UCP_EP_ATTR_FIELD_TRANSPORTS);

static_assert(sizeof(MessageParams) == sizeof(ucp_am_recv_param_t) && kMessageRendezvous == UCP_AM_RECV_ATTR_FLAG_RNDV);
static_assert(sizeof(HandlerParams) == sizeof(ucp_am_handler_param_t));
SAME(HandlerParams, ucp_am_handler_param_t, id);
SAME(HandlerParams, ucp_am_handler_param_t, cb);
SAME(HandlerParams, ucp_am_handler_param_t, arg);
static_assert(kHandlerId == UCP_AM_HANDLER_PARAM_FIELD_ID && kHandlerCall == UCP_AM_HANDLER_PARAM_FIELD_CB &&
              kHandlerArg == UCP_AM_HANDLER_PARAM_FIELD_ARG);

static_assert(sizeof(RequestParams) == sizeof(ucp_request_param_t));
SAME(RequestParams, ucp_request_param_t, flags);
SAME(RequestParams, ucp_request_param_t, cb);
SAME(RequestParams, ucp_request_param_t, user_data);
SAME(RequestParams, ucp_request_param_t, remote_count);
static_assert(kRequestCall == UCP_OP_ATTR_FIELD_CALLBACK && kRequestUserData == UCP_OP_ATTR_FIELD_USER_DATA &&
              kRequestFlags == UCP_OP_ATTR_FIELD_FLAGS && kCloseForced == UCP_EP_CLOSE_FLAG_FORCE);

}  // namespace
}  // namespace deltasync::net::ucx

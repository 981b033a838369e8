# The interop tests' client in Ruby. ../caller.py describes its input and output.
require "json"
require "grpc"
require "google/rpc/error_details_pb"
require "google/rpc/status_pb"
require "triolet/v1/inference_services_pb"

V1 = Triolet::V1
NAMES = { preserve_proto_fieldnames: true }.freeze

def details(error)
  status = error.to_rpc_status
  return {} if status.nil?

  status.details.to_h do |any|
    name = any.type_url[/\w+\z/]
    [name, JSON.parse(Google::Rpc.const_get(name).decode(any.value).to_json(NAMES))]
  end
end

def make(stub, call)
  request = V1.const_get("#{call["method"]}Request").decode_json(call["request"].to_json)
  deadline = call["deadline_s"] && (Time.now + call["deadline_s"])
  operation = stub.public_send(
    call["method"].downcase,
    request,
    deadline: deadline,
    metadata: call["metadata"] || {},
    return_op: true
  )
  messages = []
  operation.execute.each do |message|
    messages << JSON.parse(message.to_json(NAMES))
    operation.cancel if messages.size == call["cancel_after"]
  end
  { messages: messages }
rescue GRPC::BadStatus => e
  { messages: messages, code: e.code, text: e.details, details: details(e) }
end

stub = V1::Inference::Stub.new(
  ARGV[0], :this_channel_is_insecure, channel_args: { "grpc.enable_http_proxy" => 0 }
)
puts JSON.generate(JSON.parse($stdin.read).map { |call| make(stub, call) })

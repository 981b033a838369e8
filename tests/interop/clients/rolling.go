// Clients that call without pause, as rolling.js: rolling ADDRESSES REQUEST CLIENTS.
package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// raw passes messages on as they are.
type raw struct{}

func (raw) Name() string                    { return "proto" }
func (raw) Marshal(v interface{}) ([]byte, error) { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error {
	*v.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func call(conn *grpc.ClientConn, request []byte) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	desc := &grpc.StreamDesc{ServerStreams: true}
	stream, err := conn.NewStream(ctx, desc, "/triolet.v1.Inference/Generate", grpc.ForceCodec(raw{}))
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&request); err != nil && err != io.EOF {
		return err
	}
	stream.CloseSend()
	for count := 0; ; count++ {
		var message []byte
		err := stream.RecvMsg(&message)
		if err == io.EOF && count > 1 {
			return nil
		} else if err != nil {
			return fmt.Errorf("after %d messages: %v", count, err)
		}
	}
}

func main() {
	request, _ := hex.DecodeString(os.Args[2])
	clients, _ := strconv.Atoi(os.Args[3])
	var whole, begun, stopping int64
	var mutex sync.Mutex
	var group sync.WaitGroup
	lost := []string{}
	for number := 0; number < clients; number++ {
		policy := []string{"pick_first", "round_robin"}[number%2]
		builder := manual.NewBuilderWithScheme(fmt.Sprintf("both%d", number))
		state := resolver.State{}
		for _, address := range strings.Split(os.Args[1], ",") {
			state.Addresses = append(state.Addresses, resolver.Address{Addr: address})
		}
		builder.InitialState(state)
		conn, err := grpc.Dial(builder.Scheme()+":///", grpc.WithInsecure(), grpc.WithResolvers(builder),
			grpc.WithDefaultServiceConfig(`{"loadBalancingPolicy": "`+policy+`"}`))
		if err != nil {
			panic(err)
		}
		group.Add(1)
		go func() {
			defer group.Done()
			for first := true; atomic.LoadInt64(&stopping) == 0; {
				if err := call(conn, request); err != nil {
					mutex.Lock()
					lost = append(lost, policy+": "+err.Error())
					mutex.Unlock()
					continue
				}
				atomic.AddInt64(&whole, 1)
				if first && atomic.AddInt64(&begun, 1) == int64(clients) {
					fmt.Println("begun")
				}
				first = false
			}
		}()
	}
	io.Copy(io.Discard, bufio.NewReader(os.Stdin))
	atomic.StoreInt64(&stopping, 1)
	group.Wait()
	told, _ := json.Marshal(map[string]interface{}{"whole": whole, "lost": lost})
	fmt.Println(string(told))
}

package kindfile_test

import (
	"fmt"

	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/kindfile"
)

func ExampleExtend() {
	all, err := kindfile.Extend(kinds.Builtin(), []byte(`
objects:
  place: {plural: places}
edges:
  visit: {plural: visits, from: user, to: place, forward: visits, reverse: visitors}
`))
	if err != nil {
		panic(err)
	}
	visit, _ := all.Edge("visit")
	fmt.Println(visit.Names().From, visit.Names().To)
	// Output: user_id place_id
}

func ExampleReadUpstream() {
	order, err := kindfile.ReadUpstream([]byte(`
upstream: order
type_prefix: com.example
source: https://shop.example.com
events:
  paid:
    versions:
      1: {type: object, required: [id, version]}
`))
	if err != nil {
		panic(err)
	}
	fmt.Println(order.Name, len(order.Events))
	// Output: order 1
}

// Package tokens has the bearer tokens of services: whom one stands for, in which roles, and how often it may ask.
//
//	Issue, Ensure, Revoke, List (operators)  ──▶  api_tokens, by hash  ◀──  Authenticate (the API, before the tenant is known)
package tokens
